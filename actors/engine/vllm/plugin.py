"""vLLM's plugin hook. It ties the life of each process of an engine to its owner's, and lets CPU workers be forked.

vLLM loads `register` (entry point group `vllm.general_plugins`) in each process of an engine: the owner, which runs
`AsyncLLM`, the engine core and every worker.

**Life.** vLLM's core does not watch its parent. A `kill -9` of the owner would therefore leave the core and the workers
behind with their cores, memory and NIXL lease heartbeats (docs/design.md, section 7). Here each child asks the kernel
to kill it when its parent dies. Core and workers form a chain (owner -> core -> worker), so the whole tree ends. The
owner names itself in `SLUICE_ENGINE_PARENT` before it starts the engine. A child may be orphaned before it asks, so it
also checks whether the owner is still alive and exits if it is not. A spawned child asks before its imports (some 15
s), in `in_spawned_child`.

**Fork.** vLLM spawns CPU workers so that OpenMP reads its thread binding from a fresh environment. Each worker then
imports for 15 CPU seconds what its core has just imported. With one worker per core process the binding can be in the
core's own environment, and the worker is forked instead. The core itself must not be bound, so it resets its own
affinity, and the worker takes the binding.

**Tokenizer.** The core loads the tokenizer, for grammars, when its worker is ready. Until then it only waits, so here a
thread loads it as soon as the worker is forked, and vLLM finds it in its cache.

**Garbage.** Loading a model, vLLM collects garbage twice in the worker and once in the core, all of the heap each time.
Nearly all of it are the imports, which never become garbage; a forked worker would copy them for that. They are exempt.

**Waits.** vLLM's core and workers talk through shared memory, and a process that waits there calls `sched_yield` in a
loop for up to a second after the last message. That is right if each process has a core of its own. If an engine shares
its cores with others, two idle processes use up all the time that the others leave. Worse, on Linux 6.18 a process that
woke up there (the client) waited up to a second for the core, and tokens came in one burst at the end. ASSUMPTION: a
yield gives up the rest of a slice, so thousands of them a second make the queue's virtual time run ahead. The processes
of a CPU engine therefore sleep until a message wakes them, or for a millisecond; with this, the effect did not occur.
"""

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

PARENT_ENV = "SLUICE_ENGINE_PARENT"
FORK_ENV = "SLUICE_FORK_WORKER"  # the worker's cores: "0,1"
FREE_ENV = "SLUICE_OWNER_CORES"  # the cores that the owner may run on
# set where the model is loaded by `loader`
LOADER_ENV = "SLUICE_PEER_LOADER"
TOKENIZER_ENV = "SLUICE_TOKENIZER"
"""Variable with what the engine's configuration says of its tokenizer (`tokenizer_of`)."""

NAP_ENV = "SLUICE_NAP"
"""Variable that is set in the processes of a CPU engine, in which waits sleep."""

NAP_MS = 1
RECENT_S = 1.0
"""Seconds for which vLLM spins after a message (`SpinCondition.busy_loop_s`)."""

# transformers imports these if they are installed, for functions that no engine calls. Together with what they import
# (scipy, pandas) they take a quarter of vLLM's import time.
UNNEEDED = ("sklearn",)

DUMP_SIGNAL = signal.SIGUSR2
"""Signal at which a process of an engine writes the stacks of its threads to its standard error. Neither vLLM nor Ray
uses it."""

_TOKENIZER = (
    "tokenizer", "runner_type", "tokenizer_mode", "tokenizer_revision", "trust_remote_code", "skip_tokenizer_init"
)  # fmt: skip
"""The fields of vLLM's ModelConfig by which it finds a tokenizer in its cache (`cached_tokenizer_from_config`)."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ORPHANED = 70  # exit status; EX_SOFTWARE of sysexits.h

# Unix times at which this process had loaded its plugins (after nearly all imports) and was forked (0.0: never).
imported_at_s = 0.0
forked_at_s = 0.0


def children_environment(fork_worker_on: tuple[int, ...] | None) -> dict[str, str]:
    """Returns the environment variables that bind the life of this process's children to its own.

    With `fork_worker_on` the engine's one CPU worker is forked and bound to these cores.
    """
    bound = {PARENT_ENV: str(os.getpid())}
    if fork_worker_on is None:
        return bound
    return bound | {
        FORK_ENV: ",".join(map(str, fork_worker_on)),
        FREE_ENV: ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "OMP_NUM_THREADS": str(len(fork_worker_on)),
        "GOMP_CPU_AFFINITY": " ".join(map(str, fork_worker_on)),
    }


def claim_children(fork_worker_on: tuple[int, ...] | None) -> None:
    """Binds the life of this process's future children to its own (`children_environment`). The owner calls it before
    the engine starts; with `fork_worker_on` after torch is imported, or this process would bind itself.
    """
    os.environ.pop(FORK_ENV, None)
    os.environ.update(children_environment(fork_worker_on))


def spawned_child_code() -> str:
    """Returns the Python code that a spawned child runs first. It calls `in_spawned_child` of this same
    installation.
    """
    root = (
        os.path.abspath(__file__)
        .removesuffix(os.path.join("actors", "engine", "vllm", "plugin.py"))
        .rstrip(os.sep)
    )
    return (
        f"import sys; sys.path.insert(0, {root!r}); "
        "from actors.engine.vllm import plugin; plugin.in_spawned_child(); "
    )


def in_spawned_child() -> None:
    """Binds the life of a spawned child to its parent's before its imports, and hides the packages that it does not
    need.
    """
    owner = os.environ.get(PARENT_ENV, "")
    if owner.isdigit():
        die_with_parent(int(owner))
        write_stacks_at_signal()
    for package in UNNEEDED:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]


def register() -> None:
    """Binds the life of this process to its parent's if it is a child of an engine's owner, and prepares it for that.
    Elsewhere, as in vLLM's own server, only `NAP_ENV` has an effect.
    """
    global imported_at_s
    imported_at_s = time.time()
    for package in UNNEEDED:
        if package in sys.modules and sys.modules[package] is None:
            del sys.modules[package]
    owner = os.environ.get(PARENT_ENV, "")
    if not owner.isdigit():
        nap_instead_of_spinning()
        return
    if int(owner) == os.getpid():
        return
    die_with_parent(int(owner))
    write_stacks_at_signal()
    nap_instead_of_spinning()
    gc.freeze()
    if os.environ.get(LOADER_ENV):
        from actors.engine.vllm import loader

        loader.register()
    if os.environ.get(FORK_ENV):
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        os.sched_setaffinity(0, _cores(FREE_ENV))
        os.register_at_fork(after_in_child=_become_worker, after_in_parent=_load_tokenizer)


def die_with_parent(owner: int) -> None:
    """Has the kernel kill this process when the thread that started it ends. Exits at once if process `owner` has
    gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed; engine processes may outlive their owner"
        )
    if not _alive(owner):
        os._exit(_ORPHANED)


def write_stacks_at_signal() -> None:
    """Makes this process, and those that it forks, write their stacks at `DUMP_SIGNAL`. Idempotent."""
    if sys.__stderr__ is not None:
        faulthandler.register(DUMP_SIGNAL, file=sys.__stderr__, all_threads=True, chain=False)


def nap_instead_of_spinning() -> None:
    """Makes the waits on vLLM's shared memory sleep in this process, if `NAP_ENV` is set. Idempotent."""
    if not os.environ.get(NAP_ENV):
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    spinning = SpinCondition.wait
    if getattr(spinning, "naps", False):
        return

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        """Waits as vLLM does when idle, until a message is written, but at most `NAP_MS` while messages are
        frequent.
        """
        self.busy_loop_s = -1.0
        recent = time.monotonic() <= self.last_read + RECENT_S
        spinning(self, NAP_MS if recent else timeout_ms)

    wait.naps = True  # type: ignore[attr-defined]
    SpinCondition.wait = wait


def tokenizer_of(model_config: Any) -> str:
    """Returns what a core needs of vLLM's ModelConfig to load its tokenizer, for `TOKENIZER_ENV`."""
    return json.dumps({name: getattr(model_config, name) for name in _TOKENIZER})


def _load_tokenizer() -> None:
    """Runs in the core that has forked its worker. Another fork finds nothing to load any more."""
    told = os.environ.pop(TOKENIZER_ENV, "")
    if not told:
        return

    def load() -> None:
        from vllm.tokenizers import cached_tokenizer_from_config

        # what that function reads of a ModelConfig, and nothing else
        of_model: Any = SimpleNamespace(**json.loads(told))
        # the core meets the same error when it needs the tokenizer itself, and says so
        with contextlib.suppress(Exception):
            cached_tokenizer_from_config(of_model)

    threading.Thread(target=load, name="tokenizer", daemon=True).start()


def born_at_s() -> float:
    """Returns the Unix time at which this process was started."""
    if forked_at_s:
        return forked_at_s
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    with open("/proc/stat", encoding="ascii") as system:
        boot_s = next(int(line.split()[1]) for line in system if line.startswith("btime"))
    return boot_s + ticks / os.sysconf("SC_CLK_TCK")


def _become_worker() -> None:
    """Runs in the forked worker. This thread is OpenMP's first thread, so it takes the first of the worker's cores."""
    global imported_at_s, forked_at_s
    imported_at_s = forked_at_s = time.time()
    die_with_parent(int(os.environ[PARENT_ENV]))
    os.sched_setaffinity(0, _cores(FORK_ENV)[:1])


def _cores(name: str) -> list[int]:
    return [int(core) for core in os.environ[name].split(",")]


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
