"""Division of a machine's cores among its engines.

Unpinned engines share every core and delay each other: two of them on two cores decoded at 1,700 ms per token, pinned
ones at 130 ms (docs/design.md, section 8). The division is made once, when the graph is built; which engine has which
part is decided when it starts (`claim`), because engines of one node come and go.
"""

import fcntl
import os
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from actors.private_folder import make_private


def divide_cores(cores: Sequence[int], engines: int) -> tuple[tuple[int, ...], ...]:
    """Returns one tuple of core numbers per engine, in engine order.

    With enough cores the engines get disjoint runs of neighbouring cores (which share caches). Their sizes differ by
    one at most, and the larger ones come first. With more engines than cores each engine gets one core, in turn, so
    that engines share the cores evenly and each runs one thread. Raises ValueError without cores or engines.
    """
    if not cores:
        raise ValueError("divide_cores needs at least one core; this process may run on none")
    if engines < 1:
        raise ValueError(f"divide_cores needs at least one engine, got {engines}")
    ordered = sorted(set(cores))
    if engines > len(ordered):
        return tuple((ordered[i % len(ordered)],) for i in range(engines))
    size, larger = divmod(len(ordered), engines)
    starts = [i * size + min(i, larger) for i in range(engines + 1)]
    return tuple(tuple(ordered[a:b]) for a, b in pairwise(starts))


def split_ranks(cores: Sequence[int], ranks: int) -> str:
    """Returns `cores` in the format of vLLM's VLLM_CPU_OMP_THREADS_BIND: a list for each worker rank, joined by `|`."""
    return "|".join(",".join(map(str, part)) for part in divide_cores(cores, ranks))


def usable_cores() -> tuple[int, ...]:
    """Returns the cores on which this process may run, sorted."""
    return tuple(sorted(os.sched_getaffinity(0)))


_CLAIM = ".claim"


class Claim:
    """The claim of this process to `cores`, which ends with `release` or with the process.

    It is a locked file whose name has the cores. The kernel ends the lock of a process that dies, however it does.
    """

    def __init__(self, cores: tuple[int, ...], path: Path, file: int) -> None:
        self.cores, self._path, self._file = cores, path, file

    def release(self) -> None:
        """Gives the cores to whoever starts next. Idempotent."""
        if self._file >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


def claim(
    shares: Sequence[tuple[int, ...]], first: int, folder: Path, preferred: tuple[int, ...] | None = None
) -> Claim:
    """Claims one of `shares`, the one whose cores have the fewest claims; `folder` is the same for all engines of the
    node. Of equal ones it is `preferred`, or else the next from number `first` on.

    A rank does not do for this: Serve gives the rank of a replica that has gone to another one that runs, which stays
    on its cores. Raises OSError if the folder cannot be used.
    """
    make_private(folder)
    with (folder / "lock").open("w") as lock:
        # one claims at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        cores = least_crowded(shares, _claimed(folder), first, preferred)
        path = folder / f"{'_'.join(map(str, cores))}-{uuid.uuid4().hex[:12]}{_CLAIM}"
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
    return Claim(cores, path, file)


def least_crowded(
    shares: Sequence[tuple[int, ...]],
    load: Mapping[int, int],
    first: int = 0,
    preferred: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """Returns the share whose cores have the fewest claims by `load`. Of equal ones it is `preferred`, or else the next
    from number `first` on.
    """

    def crowd(at: int) -> tuple[int, int, bool, int]:
        own = [load.get(core, 0) for core in shares[at]]
        return max(own), sum(own), shares[at] != preferred, (at - first) % len(shares)

    return shares[min(range(len(shares)), key=crowd)]


def claimed(folder: Path) -> Counter[int]:
    """Returns the number of claims to each core. Raises OSError if the folder cannot be used."""
    if not folder.exists():
        return Counter()
    with (folder / "lock").open("w") as lock:
        # a claim that is being made looks like one of a dead process
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _claimed(folder)


def _claimed(folder: Path) -> Counter[int]:
    """Returns the number of claims to each core; what dead processes have left is removed."""
    load: Counter[int] = Counter()
    for path in folder.glob(f"*{_CLAIM}"):
        with path.open() as held:
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                load.update(int(core) for core in path.name.partition("-")[0].split("_"))
                continue
            path.unlink(missing_ok=True)
    return load
