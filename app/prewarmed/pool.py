"""The pre-warmed processes of one node. A new one is made for each that was taken or has died, and for one whose share
of the cores is not the one that the next engine will claim.

One that was taken keeps its place until the engine in it has started (`process.started`): on a node with few cores the
imports of its successor would slow down the very start for which it waited, however low their priority is, because
two threads of one core, and all cores, share caches and memory.
"""

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from actors.engine.cores import claimed, least_crowded
from actors.environment import changeable
from actors.private_folder import make_private
from app.prewarmed.launcher import STARTING, SUFFIX, handed_over

log = logging.getLogger("ray.serve")

RETRY_S = (1.0, 60.0)
"""Seconds until a process is made again after one that died before it was ready, or could not be made: twice as long
each time, up to the second. ASSUMPTION: what is broken for a minute is broken for good, and one try a minute harms
nobody."""

START_S = 60.0
"""Longest time for which a process that was taken keeps its place. ASSUMPTION: an engine that starts for longer waits
for a disk, a network or a GPU, and leaves the cores to imports."""

MISPLACED_S = 5.0
"""Seconds for which a less crowded share must have been there before a process that waits is made anew for it.
ASSUMPTION: longer than an engine takes to claim its share, and short beside a start."""


@dataclass(slots=True)
class Member:
    """A process of the pool with its share of the cores. It waits once its socket is there. `misplaced_at_s` is since
    when a less crowded share has been there without a break; `ends` says that it was told to end for this.
    """

    process: "subprocess.Popen[bytes]"
    cores: tuple[int, ...] | None
    waits: bool = False
    misplaced_at_s: float | None = None
    ends: bool = False


class Taken(NamedTuple):
    """A process that has become the worker of an engine, with the time at which the pool noticed."""

    process: "subprocess.Popen[bytes]"
    at_s: float


@dataclass(frozen=True, slots=True)
class Counts:
    """How many processes wait and import now, and how many were taken and died since the pool was made."""

    waiting: int = 0
    importing: int = 0
    taken: int = 0
    died: int = 0


class Pool:
    """Keeps `size` processes. `start` makes one for a share of the cores; `folder` is where they wait.

    A share is chosen as a replica would choose one that starts then (`actors.engine.cores`), which the processes that
    wait are counted for. When an engine has ended, its share may be the better one: a process that waits for another
    share would then have its core spawned anew by the next start, so it is replaced. All calls must come from one
    thread: processes die with the thread that made them.
    """

    def __init__(
        self,
        size: int,
        folder: Path,
        start: Callable[[tuple[int, ...] | None], "subprocess.Popen[bytes]"],
        shares: Sequence[tuple[int, ...]],
        claims: Path,
        clock: Callable[[], float],
    ) -> None:
        self._size, self._folder, self._start = size, folder, start
        self._shares, self._claims, self._clock = shares, claims, clock
        self._members: list[Member] = []
        self._gone: list[subprocess.Popen[bytes]] = []
        self._starting: list[Taken] = []
        self._taken = self._died = 0
        self._retry_s, self._not_before_s = RETRY_S[0], 0.0
        make_private(folder)

    def look(self) -> Counts:
        """Notes which processes are ready, were taken or have died, makes one if one is missing, and returns the
        counts. Raises OSError if none can be made.
        """
        for member in list(self._members):
            self._follow(member)
        # what was taken is a child of this process until it ends
        self._gone = [process for process in self._gone if process.poll() is None]
        self._starting = [taken for taken in self._starting if self._starts(taken)]
        # one at a time: imports of several would only slow one another
        importing = any(not member.waits for member in self._members)
        # an engine that starts has not claimed its share yet
        if not importing and not self._starting:
            self._displace()
        missing = len(self._members) + len(self._starting) < self._size
        if missing and not importing and self._clock() >= self._not_before_s:
            cores = self._share()
            try:
                self._members.append(Member(self._start(cores), cores))
            except OSError:
                self._make_later()
                raise
        waiting = sum(member.waits for member in self._members)
        return Counts(waiting, len(self._members) - waiting, self._taken, self._died)

    def close(self) -> None:
        """Ends the processes that were not taken."""
        for member in self._members:
            self._follow(member)
        for member in self._members:
            member.process.kill()
            member.process.wait()
            self._socket(member).unlink(missing_ok=True)
        self._members.clear()

    def _follow(self, member: Member) -> None:
        socket = self._socket(member)
        if member.process.poll() is not None:
            self._members.remove(member)
            socket.unlink(missing_ok=True)
            if member.ends:
                return
            self._died += 1
            log.warning("pre-warmed process %d ended (%s)", member.process.pid, member.process.returncode)
            if not member.waits:
                self._make_later()
        elif member.ends:
            return
        elif not member.waits:
            if socket.exists():
                member.waits = True
                self._retry_s = RETRY_S[0]
        elif not socket.exists():
            self._members.remove(member)
            self._gone.append(member.process)
            self._starting.append(Taken(member.process, self._clock()))
            self._taken += 1

    def _displace(self) -> None:
        """Tells one process to end that has waited for `MISPLACED_S` beside a less crowded share."""
        now_s = self._clock()
        for member in self._members:
            if member.cores is None or self._share(member) == member.cores:
                member.misplaced_at_s = None
            elif member.misplaced_at_s is None:
                member.misplaced_at_s = now_s
        for member in self._members:
            late = member.misplaced_at_s is not None and now_s - member.misplaced_at_s >= MISPLACED_S
            # it hears the pool as it hears a launcher, so it cannot be taken and told to end at once
            if late and not member.ends and handed_over(self._socket(member), []):
                log.info("pre-warmed process %d is made anew for other cores", member.process.pid)
                member.ends = True
                return

    def _starts(self, taken: Taken) -> bool:
        """Returns whether the engine in a process that was taken is still starting."""
        mark = self._socket(taken).with_suffix(STARTING)
        if taken.process.poll() is not None:
            mark.unlink(missing_ok=True)
        return mark.exists() and self._clock() - taken.at_s < START_S

    def _make_later(self) -> None:
        self._not_before_s = self._clock() + self._retry_s
        self._retry_s = min(RETRY_S[1], 2 * self._retry_s)

    def _socket(self, member: Member | Taken) -> Path:
        return self._folder / f"{member.process.pid}{SUFFIX}"

    def _share(self, of: Member | None = None) -> tuple[int, ...] | None:
        """Returns the share for a new process, or for one of the pool if it could be moved; None without shares."""
        if not self._shares:
            return None
        load = claimed(self._claims)
        for member in self._members:
            if member is not of:
                load.update(member.cores or ())
        return least_crowded(self._shares, load, preferred=None if of is None else of.cores)


def start_process(code: str, settings: str, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Starts a pre-warmed process, in a session of its own: Ray ends the process group of a worker with it."""
    return subprocess.Popen(
        [sys.executable, "-c", code, settings],
        env=changeable(environment),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
