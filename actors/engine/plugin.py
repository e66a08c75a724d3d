"""vLLM's plugin hook: makes every process of an engine die with the process that owns it.

vLLM loads `register` (entry point group `vllm.general_plugins`) in each process of an engine: the owner, which runs
`AsyncLLM`, the engine core and every worker. vLLM's core does not watch its parent, so a `kill -9` of the owner would
leave the core and the workers behind with their cores, memory and NIXL lease heartbeats (DESIGN section 7). Here each
child asks the kernel to kill it when its parent dies. Core and workers form a chain (owner -> core -> worker), so the
whole tree falls.

The owner names itself in `SLUICE_ENGINE_PARENT` before it starts the engine. Between the fork and this call (imports,
some 10 s) a child is unprotected; therefore it also looks whether the owner is still alive and leaves if it is not.
"""

import ctypes
import os
import signal
import time

PARENT_ENV = "SLUICE_ENGINE_PARENT"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ORPHANED = 70  # exit status; EX_SOFTWARE of sysexits.h

# Unix time at which this process had loaded its plugins, so nearly all of its imports; 0.0 before.
imported_at_s = 0.0


def claim_children() -> None:
    """Call in the owning process before the engine starts: its children will die with it."""
    os.environ[PARENT_ENV] = str(os.getpid())


def register() -> None:
    """Bind this process's life to its parent's, if it is a child of an engine's owner; else do nothing."""
    global imported_at_s
    imported_at_s = time.time()
    owner = os.environ.get(PARENT_ENV, "")
    if not owner.isdigit() or int(owner) == os.getpid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed; engine processes may outlive their owner"
        )
    if not _alive(int(owner)):
        os._exit(_ORPHANED)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def born_at_s() -> float:
    """Unix time at which this process was started."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    with open("/proc/stat", encoding="ascii") as system:
        boot_s = next(int(line.split()[1]) for line in system if line.startswith("btime"))
    return boot_s + ticks / os.sysconf("SC_CLK_TCK")
