"""A process that imports ahead of time becomes the one that multiprocessing would have spawned, or makes way for it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.engine.vllm.early_core import platform_environment
from tests.actors.engine.vllm.test_gpus import driver
from tests.actors.engine.vllm.test_plugin import ROOT, wait_until_gone

# An owner with an early process. `before` is run when the early process exists, and the answer comes from the process
# that multiprocessing starts then.
OWNER = """
import json, multiprocessing, os, signal, sys, time
def report(pipe):
    import ctypes
    import setproctitle
    print("the process writes", flush=True)
    setproctitle.setproctitle("the title of a core")
    with open("/proc/self/cmdline") as file: title = file.read()
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)  # PR_GET_PDEATHSIG
    pipe.send({
        "pid": os.getpid(), "late": os.environ.get("LATE"), "gone": os.environ.get("GONE"),
        "wave": "wave" in sys.modules, "death": death.value, "title": title.strip(chr(0)),
        "name": multiprocessing.current_process().name, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "threads": getattr(sys.modules.get("torch"), "threads", None),
    })
    sys.exit(3)
if __name__ == "__main__":
    from actors.engine.vllm import plugin
    from actors.engine.vllm.early_core import LATE, EarlyCore, taking
    from actors.engine.vllm.launch import spawning_through_plugin
    os.environ["GONE"] = "1"
    modules = ["wave", "no_such_module", *os.environ.get("MODULES", "").split()]
    late = LATE[os.environ.get("DEVICE", "cpu")]
    early = EarlyCore(os.environ | plugin.children_environment(None), modules, late)
    print(early.pid, flush=True)
    del os.environ["GONE"]
    os.environ["LATE"] = "yes"
    plugin.claim_children(None)
    exec(sys.argv[1])
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe(duplex=False)
    with spawning_through_plugin(), taking(early):
        child = context.Process(target=report, args=(other,) if sys.argv[2] else (), name="Core")
        child.start()
    told = mine.recv() if sys.argv[2] else {}
    child.join()
    early.close()
    if "kept" in globals(): os.dup2(kept, 1)
    print(json.dumps(told | {"early": early.pid, "taken": early.taken, "child": child.pid, "code": child.exitcode}))
"""


# `report` without its pipe: descriptors of the target's own cannot be handed over, so it writes to a file.
TO_FILE = OWNER.replace("def report(pipe):", "def report(pipe=None):\n    pipe = pipe or Pipe()").replace(
    "def report(pipe=None)",
    """class Pipe:
    def send(self, told):
        with open(os.environ["ANSWER"], "w") as file: json.dump(told, file)
def report(pipe=None)""",
)


def owner(tmp_path: Path, before: str = "pass", pipe: str = "", **environment: str) -> dict[str, Any]:
    """Returns what the owner and the process that it started report."""
    script, answer = tmp_path / "owner.py", tmp_path / "answer.json"
    script.write_text(TO_FILE)
    done = subprocess.run(
        [sys.executable, str(script), before, pipe],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "ANSWER": str(answer), **environment},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not pipe:
        told |= json.loads(answer.read_text())
    return told


def test_the_early_process_becomes_the_one_that_is_spawned(tmp_path: Path) -> None:
    told = owner(tmp_path)
    assert told["taken"]
    assert told["pid"] == told["child"] == told["early"]
    # its imports are done, its environment is the one of the moment, and it dies with its owner
    assert (told["wave"], told["late"], told["gone"]) == (True, "yes", None)
    assert told["title"] == "the title of a core"
    assert (told["death"], told["name"], told["code"]) == (int(signal.SIGKILL), "Core", 3)


def test_its_output_goes_where_its_owner_s_goes_by_then(tmp_path: Path) -> None:
    file = tmp_path / "output"
    told = owner(tmp_path, f"kept = os.dup(1); os.dup2(os.open({str(file)!r}, os.O_WRONLY | os.O_CREAT), 1)")
    assert told["taken"]
    assert file.read_text().splitlines()[0] == "the process writes"


@pytest.mark.parametrize(
    "before",
    [
        "os.environ['OMP_NUM_THREADS'] = '7'",
        "os.environ['LD_PRELOAD'] = ''",
        "os.kill(early.pid, signal.SIGKILL); early._process.wait()",
        "early.close()",
    ],
)
def test_a_process_is_spawned_where_the_early_one_does_not_do(tmp_path: Path, before: str) -> None:
    told = owner(tmp_path, before)
    assert not told["taken"]
    assert told["pid"] == told["child"] != told["early"]
    assert (told["wave"], told["late"], told["gone"], told["code"]) == (False, "yes", None, 3)
    wait_until_gone([told["early"]])


def test_a_target_with_descriptors_of_its_own_is_spawned(tmp_path: Path) -> None:
    told = owner(tmp_path, pipe="with a pipe")
    assert not told["taken"]
    assert (told["pid"], told["code"]) == (told["child"], 3)


def test_an_early_process_dies_with_its_owner(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(TO_FILE)
    process = subprocess.Popen(
        [sys.executable, str(script), "time.sleep(60)", ""],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    early = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until_gone([early])


def test_a_gpu_s_core_gets_what_importing_vllm_sets() -> None:
    assert platform_environment("cuda", {}) == {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


def test_a_number_of_threads_that_vllm_chose_is_no_reason_to_spawn(tmp_path: Path) -> None:
    chosen = "os.environ.update(OMP_NUM_THREADS='7', VLLM_OMP_NUM_THREADS_SET_BY_VLLM='1')"
    told = owner(tmp_path, chosen)
    assert told["taken"]
    assert told["pid"] == told["early"]


WARMED = "early.wait_imported(); "
"""Code that the owner of a pre-warmed process has run when Ray gives it its GPUs."""
GIVEN = WARMED + "os.environ.update(CUDA_VISIBLE_DEVICES='3', OMP_NUM_THREADS='4')"


def gpu_modules(folder: Path, initialises: bool) -> dict[str, str]:
    """Makes modules in the place of PyTorch and of one that loads CUDA's driver, and returns the environment in which
    an early process for a GPU imports them.
    """
    (folder / "torch.py").write_text(
        "threads = None\ndef set_num_threads(number):\n    global threads\n    threads = number\n"
    )
    call = "library.cuInit(0)" if initialises else ""
    (folder / "gpu_code.py").write_text(
        f"import ctypes\nlibrary = ctypes.CDLL({str(driver(folder))!r})\n{call}\n"
    )
    return {"MODULES": "torch gpu_code", "DEVICE": "cuda", "OMP_NUM_THREADS": "1"}


def test_a_pre_warmed_core_gets_its_gpus_and_threads_when_it_is_taken(tmp_path: Path) -> None:
    told = owner(tmp_path, GIVEN, **gpu_modules(tmp_path, initialises=False))
    assert told["taken"]
    assert (told["pid"], told["wave"]) == (told["early"], True)
    assert (told["gpus"], told["threads"]) == ("3", 4)


@pytest.mark.parametrize(
    ("before", "changes", "initialises"),
    [
        # CUDA has read the variable by then
        (GIVEN, {}, True),
        # nobody knows yet whether it has
        (GIVEN.removeprefix(WARMED), {}, False),
        (GIVEN, {"DEVICE": "cpu"}, False),
        (WARMED + "del os.environ['OMP_NUM_THREADS']", {}, False),
    ],
)
def test_a_core_is_spawned_where_its_gpus_come_too_late(
    tmp_path: Path, before: str, changes: dict[str, str], initialises: bool
) -> None:
    told = owner(tmp_path, before, **(gpu_modules(tmp_path, initialises) | changes))
    assert not told["taken"]
    assert (told["pid"], told["threads"]) == (told["child"], None)


def test_a_core_whose_imports_initialise_cuda_serves_the_gpus_that_it_sees(tmp_path: Path) -> None:
    assert owner(tmp_path, WARMED, **gpu_modules(tmp_path, initialises=True))["taken"]


def test_openmp_and_an_allocator_are_preloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.engine.vllm.early_core._folder", lambda package: str(tmp_path / package))

    def preloaded(before: str) -> str | None:
        return platform_environment("cpu", {"LD_PRELOAD": before}).get("LD_PRELOAD")

    assert preloaded("") is None
    for name in ("torch/lib/libgomp.so.1", "torch.libs/libgomp-24e2.so.1.0.0", "vllm/libs/libtcmalloc.so.4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    openmp, allocator = tmp_path / "torch.libs/libgomp-24e2.so.1.0.0", tmp_path / "vllm/libs/libtcmalloc.so.4"
    assert preloaded("") == f"{allocator}:{openmp}"
    assert preloaded("/x/mine.so") == f"{allocator}:/x/mine.so:{openmp}"
    assert preloaded("/x/libiomp5.so") == f"{allocator}:/x/libiomp5.so"
    assert preloaded("/x/libtcmalloc.so.4") == f"/x/libtcmalloc.so.4:{openmp}"
