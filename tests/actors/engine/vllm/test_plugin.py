"""Children of an engine's owner die with it, also in the seconds before they have asked for it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import ended

ROOT = Path(__file__).parents[4]

# A parent that starts a child and a grandchild as an engine does; each reports its pid once it is registered.
TREE = """
import os, subprocess, sys, time
from actors.engine.vllm import plugin
depth = int(sys.argv[1])
if depth == 2:
    plugin.claim_children(None)
plugin.register()
print(os.getpid(), flush=True)
if depth:
    subprocess.Popen([sys.executable, "-c", os.environ["TREE"], str(depth - 1)])
time.sleep(60)
"""


def start(code: str, *args: str, **env: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )


def wait_until_gone(pids: list[int]) -> None:
    for _ in range(3000):
        if all(map(ended, pids)):
            return
        time.sleep(0.02)
    pytest.fail(f"still alive: {[pid for pid in pids if not ended(pid)]}")


def test_kill_of_the_owner_takes_the_whole_tree() -> None:
    owner = start(TREE, "2", TREE=TREE)
    assert owner.stdout is not None
    pids = [int(owner.stdout.readline()) for _ in range(3)]
    assert not any(map(ended, pids))
    os.kill(pids[0], signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until_gone(pids[1:])


def test_what_a_child_has_imported_is_exempt_from_collections() -> None:
    """In a process of its own, because the exemption is the process's."""
    code = """
import gc, os, subprocess, sys
from actors.engine.vllm import plugin
if len(sys.argv) == 1:
    plugin.claim_children(None)
    sys.exit(subprocess.run([sys.executable, "-c", os.environ["CODE"], "child"]).returncode)
class Loaded: pass
loaded = Loaded()
plugin.register()
assert gc.get_freeze_count() > 0
assert not any(kept is loaded for kept in gc.get_objects())
"""
    assert start(code, CODE=code).wait(60) == 0


def test_a_child_whose_owner_has_gone_leaves_at_once() -> None:
    dead = start("pass")
    dead.wait()
    assert dead.stdout is not None
    dead.stdout.close()
    child = start(
        "from actors.engine.vllm import plugin; plugin.register(); print('stayed')",
        SLUICE_ENGINE_PARENT=str(dead.pid),
    )
    output, _ = child.communicate()
    assert (child.returncode, output) == (70, b"")


def test_nothing_happens_outside_an_engine() -> None:
    for owner in ("", "not a pid"):
        child = start(
            "from actors.engine.vllm import plugin; plugin.register(); print('stayed')",
            SLUICE_ENGINE_PARENT=owner,
        )
        output, _ = child.communicate()
        assert (child.returncode, output) == (0, b"stayed\n")


FORKING = """
import os
from actors.engine.vllm import plugin
cores = tuple(sorted(os.sched_getaffinity(0)))
plugin.claim_children(cores[-1:])
os.environ["SLUICE_ENGINE_PARENT"] = str(os.getppid())   # so that this process counts as the owner's child, the core
plugin.register()
assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
assert tuple(sorted(os.sched_getaffinity(0))) == cores
before = plugin.born_at_s()
if (pid := os.fork()) == 0:
    bound = os.sched_getaffinity(0) == {cores[-1]}
    os._exit(0 if bound and plugin.born_at_s() > before and plugin.imported_at_s == plugin.forked_at_s else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), os.environ["OMP_NUM_THREADS"])
"""


def test_a_forked_worker_is_bound_and_its_core_is_not() -> None:
    child = start(FORKING)
    output, _ = child.communicate()
    assert (child.returncode, output) == (0, b"0 1\n")


def test_a_process_knows_when_it_was_born() -> None:
    from actors.engine.vllm import plugin

    assert abs(plugin.born_at_s() - psutil.Process().create_time()) < 2.0


SPAWNED = """
import multiprocessing, os, sys
def report(pipe):
    import ctypes
    signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal), 0, 0, 0)  # PR_GET_PDEATHSIG
    try:
        import sklearn
    except ImportError:
        hidden = True
    else:
        hidden = False
    from actors.engine.vllm import plugin
    plugin.register()
    pipe.send((signal.value, hidden, "sklearn" in sys.modules))
if __name__ == "__main__":
    from actors.engine.vllm import plugin
    from actors.engine.vllm import launch as vllm_launch
    plugin.claim_children(None)
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    with vllm_launch.spawning_through_plugin():
        child = context.Process(target=report, args=(other,))
        child.start()
    print(mine.recv())
    child.join()
"""


def test_a_spawned_child_is_bound_before_its_imports_and_spared_some(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == f"({int(signal.SIGKILL)}, True, False)\n", done.stderr


def test_a_core_loads_the_tokenizer_while_its_worker_starts() -> None:
    """The core's own question for it finds the cache filled."""
    code = """
import os, sys, time
from types import SimpleNamespace
from actors.engine.vllm import plugin
from app.models import resolve
config = SimpleNamespace(
    tokenizer=str(resolve("smollm2-135m-instruct")), runner_type="generate", tokenizer_mode="auto",
    tokenizer_revision=None, trust_remote_code=False, skip_tokenizer_init=False, hf_config=None,
)
if len(sys.argv) == 1:
    plugin.claim_children((0,))
    os.environ[plugin.TOKENIZER_ENV] = plugin.tokenizer_of(config)
    os.execv(sys.executable, [sys.executable, "-c", os.environ["CODE"], "core"])
from vllm.tokenizers import registry
os.environ[plugin.PARENT_ENV] = str(os.getppid())
plugin.register()
if not (worker := os.fork()):
    os._exit(0)
os.waitpid(worker, 0)
while not registry.cached_get_tokenizer.cache_info().currsize: time.sleep(0.02)
assert registry.cached_tokenizer_from_config(config) is not None
assert registry.cached_get_tokenizer.cache_info().hits == 1
# it is loaded once
assert plugin.TOKENIZER_ENV not in os.environ
"""
    assert start(code, CODE=code).wait(100) == 0
