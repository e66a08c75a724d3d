"""The process of an engine's core, started before vLLM asks for it, so that its imports do not wait for the owner's.

vLLM starts a core with `multiprocessing`'s spawn method once it has imported everything and made its configuration. The
core is a new Python, which imports for as long as its owner has just done. An `EarlyCore` is that process ahead of
time: it imports beside its owner, and then waits. When vLLM starts its core, `take` hands the waiting process what
`multiprocessing` would have passed to a new one: the pipes, the environment, and where its output goes. From then on it
is the core.

An environment variable that takes effect before or during the imports (`EARLY`) cannot be handed over. If one differs
by then, `take` refuses, and the core is spawned as usual. So the owner must know these variables beforehand:
`platform_environment` says what vLLM will set.

A process that is pre-warmed for a GPU cannot know two of them (`LATE`), because Ray sets these in a replica only: which
GPUs it has, and its number of threads. CUDA reads the former when it is initialised, which the imports should not do.
The early process looks whether they have (`actors.engine.vllm.gpus`), and if they have not, both are handed over.

vLLM's own ways were judged. Its `forkserver` serves the API's processes and not the core; a core that is forked from a
server would have the server's OpenMP binding, and its life would not be bound to its owner's. To fork the core from the
owner ends in Ray's threads, for which vLLM itself enforces spawn in an actor.
"""

import contextlib
import glob
import importlib
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import spawn, util
from typing import Any

from actors import background
from actors.engine.vllm import plugin
from actors.engine.vllm.config import CONNECTOR_MODULE, SCHEDULERS, Device
from actors.engine.vllm.gpus import VISIBLE, driver_initialised
from actors.environment import change, changeable

log = logging.getLogger(__name__)

SPAWNED = "--multiprocessing-fork"
"""The argument by which `multiprocessing` knows that a process was spawned."""

EARLY = (
    "LD_PRELOAD", "OMP_", "GOMP_", "KMP_", "TORCH_", "TORCHINDUCTOR_COMPILE", "TORCHINDUCTOR_CPP", "CUDA_", "HF_",
    "TRANSFORMERS_", "PYTHON",
)  # fmt: skip
"""Prefixes of the environment variables that are read when a process starts, or by an import. LD_LIBRARY_PATH is none
of them: packages that are imported change it, in the early process as in its owner."""

CHOSEN_THREADS = ("OMP_NUM_THREADS", "VLLM_OMP_NUM_THREADS_SET_BY_VLLM")
"""The number of threads with which a GPU's core loads weights, and vLLM's mark that it chose the number, for want of
one in the environment. An early process has PyTorch's own number, and each sets 1 when it has loaded."""

LATE: Mapping[Device, frozenset[str]] = {"cpu": frozenset(), "cuda": frozenset({VISIBLE, CHOSEN_THREADS[0]})}
"""The variables of `EARLY` that can be handed over to a process that waits, as long as it has not initialised CUDA."""

WORKERS: Mapping[Device, tuple[str, ...]] = {
    "cpu": (
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.utils.cpu_triton_utils",
        "vllm.v1.pool.flash_maxsim",
        "vllm.distributed.elastic_ep.elastic_execute",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.model_executor.layers.quantization.online.fp8",
        "vllm.model_executor.layers.quantization.online.int8",
        "vllm.model_executor.layers.quantization.online.mxfp4",
        "vllm.model_executor.layers.quantization.online.mxfp8",
        "vllm.model_executor.layers.quantization.online.nvfp4",
    ),
    "cuda": ("vllm.v1.worker.gpu_worker",),
}
"""The modules from which follows what a worker imports. After the first one, a CPU worker would import them as it loads
a model, whether or not the model needs them. For GPUs nobody has looked whether they initialise CUDA (`LATE`)."""

_OUTPUT = (1, 2)
"""The descriptors of standard output and standard error."""
_IMPORTED, _CUDA_INITIALISED = b"i", b"c"
_LENGTH_BYTES = 4
_MOST_FDS = 8


class EarlyCore:
    """A process that imports for a core. It dies with the thread that made it, as every child of an engine's owner does
    (`plugin`).
    """

    def __init__(
        self, environment: Mapping[str, str], modules: Sequence[str], late: frozenset[str] = frozenset()
    ) -> None:
        """Starts the process with this environment, which needs `plugin.children_environment`. Variables of `late` (see
        `LATE`) may differ when the process is taken, if `wait_imported` was called before. Raises OSError.
        """
        self._environment = dict(environment)
        self._may_come: frozenset[str] = frozenset()
        self._late_names = late
        self._channel, theirs = socket.socketpair()
        with theirs:
            code = (
                f"{plugin.spawned_child_code()}from actors.engine.vllm import early_core; "
                f"early_core.become_core({theirs.fileno()}, {list(modules)!r})"
            )
            self._process = subprocess.Popen(
                [sys.executable, *_interpreter_flags(), "-c", code, SPAWNED],
                env=changeable(self._environment),
                pass_fds=[theirs.fileno()],
            )
        self.pid = self._process.pid
        self.taken = False

    def fileno(self) -> int:
        """Returns a descriptor that can be read once the process has ended, after `wait_imported`."""
        return self._channel.fileno()

    def wait_imported(self) -> None:
        """Waits until the process has imported everything. Raises RuntimeError if it has ended."""
        told = self._channel.recv(1)
        if not told:
            raise RuntimeError(
                f"the early process {self.pid} of an engine's core has ended during its imports"
            )
        if told == _IMPORTED:
            self._may_come = self._late_names
        elif self._late_names:
            log.warning(
                "the imports of the early process %d have initialised CUDA, so it serves only an engine that has the"
                " GPUs which it sees",
                self.pid,
            )

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Returns whether the process, with this environment from now on, is as good as a new one."""
        return not self.late(environment)

    def late(self, environment: Mapping[str, str]) -> list[str]:
        """Returns the names of the variables by which this environment comes too late for the process, sorted."""
        return sorted(
            name
            for name in {*self._environment, *environment}
            if name.startswith(EARLY)
            and self._environment.get(name) != environment.get(name)
            and not self._can_come(name, environment)
        )

    def _can_come(self, name: str, environment: Mapping[str, str]) -> bool:
        threads, chosen = CHOSEN_THREADS
        if name != threads:
            return name in self._may_come
        return bool(environment.get(chosen)) or (
            name in self._may_come and environment.get(name, "").isdigit()
        )

    def take(self, fds: Sequence[int], environment: Mapping[str, str]) -> int | None:
        """Makes the process the core that would have been spawned with these descriptors (resource tracker, pipe,
        sentinel) and this environment. Returns its process id, or None if it cannot be that core.
        """
        if self.taken or len(fds) != 3:
            return None
        late = self.late(environment)
        if late:
            log.warning("the core is spawned anew: %s changed after its imports began", ", ".join(late))
            return None
        text = json.dumps(dict(environment)).encode()
        try:
            # its output goes where this process's goes now
            handed = [*fds, *_OUTPUT]
            socket.send_fds(self._channel, [len(text).to_bytes(_LENGTH_BYTES, "big")], handed)
            self._channel.sendall(text)
        except OSError as error:
            log.warning("the core is spawned anew: its early process %d has gone (%s)", self.pid, error)
            return None
        self.taken = True
        # multiprocessing waits for the process from now on
        self._process.returncode = 0
        return self.pid

    def close(self) -> None:
        """Ends the process unless it was taken. A taken one must have read what it was handed. Idempotent."""
        self._channel.close()
        if self.taken:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


def become_core(channel: int, modules: Sequence[str]) -> None:
    """Runs in the early process: imports `modules`, waits until it is taken, and then runs the core. Ends the process
    when its owner gives it up.
    """
    for module in modules:
        # the core itself reports what is missing
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    background.end()
    with socket.socket(fileno=channel) as owner:
        owner.sendall(_CUDA_INITIALISED if driver_initialised() else _IMPORTED)
        header, fds, _, _ = socket.recv_fds(owner, _LENGTH_BYTES, _MOST_FDS)
        if not header:
            sys.exit(0)
        environment = json.loads(_exactly(owner, int.from_bytes(header, "big")))
    before = dict(os.environ)
    change(environment)
    take_threads(before)
    # the third is the sentinel, which only has to stay open
    tracker, pipe, _, *output = fds
    for number, fd in zip(_OUTPUT, output, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    spawn.spawn_main(pipe_handle=pipe, tracker_fd=tracker)


def take_threads(before: Mapping[str, str]) -> None:
    """Gives PyTorch, if it is loaded, the number of threads of the environment, where that was another one `before`. A
    number that vLLM chose changes nothing (`CHOSEN_THREADS`).
    """
    threads, chosen = CHOSEN_THREADS
    number, torch = os.environ.get(threads, ""), sys.modules.get("torch")
    if (
        torch is not None
        and number.isdigit()
        and number != before.get(threads)
        and not os.environ.get(chosen)
    ):
        torch.set_num_threads(int(number))


def core_modules(device: Device, asynchronous: bool = False) -> tuple[str, ...]:
    """Returns the modules from which follows nearly all that a core and its workers import, whatever the model."""
    scheduler = SCHEDULERS[asynchronous].rpartition(".")[0]
    return (
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        *WORKERS[device],
        CONNECTOR_MODULE,
        scheduler,
    )


def platform_environment(device: Device, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of `EARLY` that vLLM will set for the core, beside `environment`: one everywhere, when it
    is imported (`vllm.env_override`), and on CPUs it preloads PyTorch's OpenMP and, if it brings one, its own allocator
    (`vllm.platforms.cpu`, `check_and_update_config`).
    """
    found = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if device != "cpu":
        return found
    found["TORCHINDUCTOR_CPP_DYNAMIC_THREADS"] = "1"
    preloaded = environment.get("LD_PRELOAD", "")
    torch, vllm = _folder("torch"), _folder("vllm")
    if not any(name in preloaded for name in ("libomp", "libgomp", "libiomp")):
        libraries = glob.glob(os.path.join(os.path.dirname(torch), "torch.libs", "libgomp*.so*"))
        libraries += glob.glob(os.path.join(torch, "lib", "libgomp*.so*"))
        preloaded = ":".join([*filter(None, [preloaded]), *libraries[:1]])
    if "libtcmalloc" not in preloaded:
        allocators = glob.glob(os.path.join(vllm, "libs", "libtcmalloc_minimal*.so*"))
        allocators += glob.glob(os.path.join(vllm, "libs", "libtcmalloc.so*"))
        preloaded = ":".join([*allocators[:1], *filter(None, [preloaded])])
    return found | ({"LD_PRELOAD": preloaded} if preloaded else {})


@contextlib.contextmanager
def taking(early: EarlyCore | None) -> Any:
    """Has `multiprocessing` take `early` for the first process that it spawns in this context."""
    ordinary = util.spawnv_passfds

    def spawned(path: Any, args: Sequence[Any], fds: Sequence[int]) -> int:
        taken = early.take(fds, os.environ) if early is not None and SPAWNED in args else None
        return ordinary(path, args, fds) if taken is None else taken

    util.spawnv_passfds = spawned  # type: ignore[assignment]
    try:
        yield
    finally:
        util.spawnv_passfds = ordinary


def _interpreter_flags() -> list[str]:
    return list(util._args_from_interpreter_flags())  # type: ignore[attr-defined]


def _folder(package: str) -> str:
    """Returns the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return os.path.dirname(spec.origin)


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = channel.recv(count - len(parts))
        if not part:
            sys.exit(0)
        parts += part
    return bytes(parts)
