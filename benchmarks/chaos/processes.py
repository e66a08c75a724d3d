"""The processes of a running application by their part: found, killed, stopped, starved of memory, and measured."""

import os
import resource
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import psutil

from benchmarks.live.proctree import name_of

PART_OF = {
    "prefill": "prefill",
    "decode": "decode",
    "router": "router",
    "ingress": "ingress",
    "serve controller": "controller",
    "serve proxy": "proxy",
    "core": "core",
    "worker": "worker",
    "flow agent": "agent",
    "flow coordinator": "coordinator",
    "gcs": "gcs",
    "replica Autoscaler": "autoscaler",
}
"""The part of a process by the role that `benchmarks.live.proctree` reads in its command line."""

SPARE_BYTES = 2 * 2**20
"""Address space that a process which is starved of memory, and hoards, may still take: so much that it gets to know
that there is no more. ASSUMPTION: a few requests' worth."""
SHORT_BYTES = 2**18
"""Address space that is left to a process to which an allocation has failed: its heap grows by 132 kB at least (glibc's
M_TOP_PAD and the request)."""


@dataclass(slots=True)
class Member:
    """One process of a part. `name` is the engine's id, or the part with the pid. `engine_id` is that of the engine
    which the process is, or to which an engine core or a worker belongs.
    """

    part: str
    pid: int
    started_s: float
    name: str
    engine_id: str | None = None

    def process(self) -> psutil.Process | None:
        """Returns the process, or None if it has ended (even if another one has its pid now)."""
        try:
            found = psutil.Process(self.pid)
            if found.create_time() == self.started_s and found.status() != psutil.STATUS_ZOMBIE:
                return found
        except psutil.NoSuchProcess:
            pass
        return None

    def alive(self) -> bool:
        """Returns whether the process lives, stopped or not."""
        return self.process() is not None

    def running(self) -> bool:
        """Returns whether the process lives and has not been stopped by a signal."""
        found = self.process()
        return found is not None and found.status() != psutil.STATUS_STOPPED

    def signal(self, number: signal.Signals) -> bool:
        """Sends a signal; returns whether the process still lived."""
        found = self.process()
        if found is None:
            return False
        try:
            found.send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return True

    def starve(self, hoards: bool) -> int | None:
        """Limits the address space of the process, and returns the limit; None if it has ended. One that `hoards` takes
        the little that it leaves by itself; for any other the limit is below what it has, so that it gets nothing new.
        """
        taken_bytes = self.taken_bytes()
        if taken_bytes is None:
            return None
        limit = taken_bytes + SPARE_BYTES if hoards else taken_bytes // 2
        resource.prlimit(self.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        return limit

    def taken_bytes(self) -> int | None:
        """Returns the address space of the process, or None if it has ended."""
        found = self.process()
        try:
            return None if found is None else int(found.memory_info().vms)
        except psutil.NoSuchProcess:
            return None

    def feed(self) -> None:
        """Ends `starve`."""
        if self.alive():
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(self.pid, resource.RLIMIT_AS, unlimited)

    def remote_ports(self) -> set[int]:
        """Returns the ports at the other ends of the process's TCP connections."""
        found = self.process()
        if found is None:
            return set()
        try:
            return {c.raddr.port for c in found.net_connections(kind="tcp") if c.raddr}
        except psutil.Error:
            return set()


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory and open files of one process at one moment."""

    t_s: float
    rss_bytes: int
    fds: int


@dataclass(slots=True)
class Track:
    """The samples of one process over its life."""

    name: str
    samples: list[Sample] = field(default_factory=list)


def members(root_pid: int, known: Mapping[int, Member] | None = None) -> dict[int, Member]:
    """Returns the processes of all parts below `root_pid`, by pid; those in `known` are taken over as they are.

    A process gets its part from its title, so one that has just started may be missing, and a worker has the title of
    its engine core at first.
    """
    found: dict[int, Member] = {}
    try:
        tree = psutil.Process(root_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return found
    for process in tree:
        try:
            started_s = process.create_time()
            old = (known or {}).get(process.pid)
            known_for_good = old is not None and old.started_s == started_s and old.part != "core"
            if old is not None and known_for_good and (old.engine_id or old.part not in _ENGINES):
                if old.alive():
                    found[process.pid] = old
                continue
            part = PART_OF.get(name_of(process.cmdline()) or "")
            if part is None or process.status() == psutil.STATUS_ZOMBIE:
                continue
            engine_id = _engine_id(process) if part in _ENGINES else None
            name = engine_id or f"{part} {process.pid}"
            found[process.pid] = Member(part, process.pid, started_s, name, engine_id)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    for member in found.values():
        if member.part in ("core", "worker") and member.engine_id is None:
            member.engine_id = _owner(member, found)
    return found


def _owner(member: Member, found: Mapping[int, Member]) -> str | None:
    """Returns the id of the engine below which a process runs."""
    process = member.process()
    try:
        parents = process.parents() if process else []
    except psutil.NoSuchProcess:
        return None
    owners = (found[parent.pid] for parent in parents if parent.pid in found)
    return next((owner.engine_id for owner in owners if owner.part in _ENGINES), None)


_ENGINES = ("prefill", "decode")


def _engine_id(process: psutil.Process) -> str | None:
    """Returns the id of the engine in a process, from the name of the socket on which it listens for work."""
    for connection in process.net_connections(kind="unix"):
        path = str(connection.laddr or "")
        name = os.path.basename(path)
        # an engine that lends its weights listens for those who want them at another one
        if path.endswith(".sock") and "/chaos-wire/" in path and not name.startswith("weights-"):
            return name.rsplit("-", 1)[0]
    return None


def by_part(
    found: Iterable[Member], part_of: Callable[[Member], str] = lambda member: member.part
) -> dict[str, list[Member]]:
    """Returns the members of each part, by name."""
    parts: dict[str, list[Member]] = defaultdict(list)
    for member in sorted(found, key=lambda m: m.name):
        parts[part_of(member)].append(member)
    return dict(parts)


def measure(found: Iterable[Member], t_s: float, tracks: dict[tuple[int, float], Track]) -> None:
    """Adds a sample of each process to its track."""
    for member in found:
        process = member.process()
        if process is None:
            continue
        try:
            sample = Sample(t_s, process.memory_info().rss, process.num_fds())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        key = (member.pid, member.started_s)
        tracks.setdefault(key, Track(member.name)).samples.append(sample)


def slope_per_hour(samples: list[tuple[float, float]]) -> float | None:
    """Returns the slope of a straight line through (seconds, value) by least squares, per hour; None without a line."""
    n = len(samples)
    if n < 3:
        return None
    mean_t = sum(t for t, _ in samples) / n
    mean_v = sum(v for _, v in samples) / n
    spread = sum((t - mean_t) ** 2 for t, _ in samples)
    if spread == 0:
        return None
    return 3600 * sum((t - mean_t) * (v - mean_v) for t, v in samples) / spread
