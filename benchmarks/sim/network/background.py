"""Background traffic: the share of a link's capacity that others use over time, so that simulated flows cannot.

    Static    one share all the time: NetKV's steady-state offered load (VI-B)
    Piecewise (time, share) steps, repeated every `period_s` if given
    OnOff     `share` for exponential times of mean `on_s`, then 0 for exponential times of mean `off_s`; every link
              draws its own times from the network's seed and the link's name, and starts on with probability
              on_s / (on_s + off_s)

Several loads on one link add up; the sum of their largest shares must stay below 1.
"""

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.sim.network.topology import LINK_CLASSES, Topology, TopologyError

# A step is (time in seconds, the share from that time on).
Step = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Static:
    share: float

    def __post_init__(self) -> None:
        _check_share(self.share)

    @property
    def peak(self) -> float:
        return self.share

    def steps(self, rng: random.Random) -> Iterator[Step]:
        yield 0.0, self.share


@dataclass(frozen=True, slots=True)
class Piecewise:
    """A share that changes in steps. The times of `points` begin at 0 and rise; `period_s` None is no repetition."""

    points: tuple[Step, ...]
    period_s: float | None = None

    def __post_init__(self) -> None:
        times = [time_s for time_s, _ in self.points]
        if not times or times[0] != 0.0 or any(not a < b for a, b in itertools.pairwise(times)):
            raise TopologyError(f"background: times {times} must begin with 0 and rise")
        if self.period_s is not None and not times[-1] < self.period_s < math.inf:
            raise TopologyError(
                f"background: period_s {self.period_s} must lie behind the last time {times[-1]}"
            )
        for _, share in self.points:
            _check_share(share)

    @property
    def peak(self) -> float:
        return max(share for _, share in self.points)

    def steps(self, rng: random.Random) -> Iterator[Step]:
        turn = 0
        while True:
            for time_s, share in self.points:
                yield time_s + turn * (self.period_s or 0.0), share
            if self.period_s is None:
                return
            turn += 1


@dataclass(frozen=True, slots=True)
class OnOff:
    share: float
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        _check_share(self.share)
        if not (0 < self.on_s < math.inf and 0 < self.off_s < math.inf):
            raise TopologyError(f"background: on_s {self.on_s} and off_s {self.off_s} must be > 0 and finite")

    @property
    def peak(self) -> float:
        return self.share

    def steps(self, rng: random.Random) -> Iterator[Step]:
        time_s, on = 0.0, rng.random() * (self.on_s + self.off_s) < self.on_s
        while True:
            yield time_s, self.share if on else 0.0
            time_s += rng.expovariate(1.0 / (self.on_s if on else self.off_s))
            on = not on


Load = Static | Piecewise | OnOff


@dataclass(frozen=True, slots=True)
class Background:
    """A load on `where`: "all", a link class (nvlink, nic, rack, core) or the name of a link."""

    where: str
    load: Load

    def link_indices(self, topology: Topology) -> list[int]:
        """Returns the indices of the links under this load.

        "all" leaves NVLink out, because other tenants' traffic does not cross it.
        """
        if self.where == "all":
            return [link.index for link in topology.links if link.kind != "nvlink"]
        if self.where in LINK_CLASSES:
            return [link.index for link in topology.links if link.kind == self.where]
        return [topology.link(self.where).index]


class Shares:
    """The shares that the loads take of every link, as of the last `advance`. Equal seeds give equal shares."""

    def __init__(self, topology: Topology, loads: Sequence[Background], seed: int) -> None:
        _check_peaks(topology, loads)
        # For each link: the share of each source.
        self._share: list[dict[int, float]] = [{} for _ in topology.links]
        self._sources: list[tuple[int, Iterator[Step]]] = []
        self._next: list[tuple[float, int, float]] = []  # time, source, share
        for number, background in enumerate(loads):
            for link in background.link_indices(topology):
                rng = random.Random(f"{seed}/{number}/{topology.links[link].name}")
                self._sources.append((link, background.load.steps(rng)))
                self._pull(len(self._sources) - 1)

    def __getitem__(self, link: int) -> float:
        return sum(self._share[link].values())

    def all(self) -> list[float]:
        return [self[link] for link in range(len(self._share))]

    @property
    def next_s(self) -> float:
        """The time in seconds of the next change of a share, or infinity if there is none."""
        return self._next[0][0] if self._next else math.inf

    def advance(self, now_s: float) -> list[int]:
        """Applies the changes up to `now_s`; returns the indices of the links whose share changed."""
        changed = []
        while self._next and self._next[0][0] <= now_s:
            _, source, share = heapq.heappop(self._next)
            link = self._sources[source][0]
            self._share[link][source] = share
            changed.append(link)
            self._pull(source)
        return changed

    def _pull(self, source: int) -> None:
        for time_s, share in self._sources[source][1]:
            heapq.heappush(self._next, (time_s, source, share))
            return


def _check_peaks(topology: Topology, loads: Sequence[Background]) -> None:
    """Raises TopologyError if the loads on some link can together take all of it."""
    peaks: dict[int, float] = {}
    for background in loads:
        for link in background.link_indices(topology):
            peaks[link] = peaks.get(link, 0.0) + background.load.peak
            if peaks[link] >= 1.0:
                raise TopologyError(
                    f"background: the loads of {topology.links[link].name} reach {peaks[link]:g} of its capacity "
                    f"together; they must stay below 1"
                )


def _check_share(share: float) -> None:
    if not 0.0 <= share < 1.0:
        raise TopologyError(f"background: share {share} must be in [0, 1)")
