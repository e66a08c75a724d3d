"""KV transfers between nodes. Numbers and bytes by tier and by pair are what ingresses count, of every transfer.
Durations are of the requests whose facts the ingresses kept, and bandwidths are what the router knows of the network.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

from actors.telemetry.facts import Attempt
from actors.wire.messages import Figures, PathSeen
from app.dashboard.ingresses import WINDOW_S
from app.dashboard.rings import Value, quantile
from app.fleet.moved import OTHER, PAIR, PAIR_BYTES, PAIR_TRANSFERS, TIER, TIER_BYTES

SLOWEST = 10
SLOWEST_FOR_S = 900.0
MOST_PAIRS = 64
"""Pairs of nodes that the page shows, those with most bytes first."""

Labels = tuple[str, ...]
Pair = tuple[str, str]


class _Moved(NamedTuple):
    """Transfers and bytes by tier or pair, which are the labels of the ingresses' counters."""

    tier_bytes: dict[Labels, float]
    pair_bytes: dict[Labels, float]
    pair_transfers: dict[Labels, float]


class _Timed(NamedTuple):
    """A transfer whose facts an ingress kept."""

    at_s: float
    seconds: float
    held_s: float
    level: int | None


class Transfers:
    """The transfers of the window by tier and by pair of nodes, and the slowest ones of the last 15 minutes."""

    def __init__(self) -> None:
        self._counts: dict[str, _Moved] = {}
        self._moved: deque[tuple[float, _Moved]] = deque()
        self._timed: deque[_Timed] = deque()
        self._totals: OrderedDict[Pair, int] = OrderedDict()
        self._slowest: list[dict[str, Any]] = []
        self._paths: dict[Pair, PathSeen] = {}
        self._nodes: Set[str] = set()

    def paths(self, paths: Sequence[PathSeen]) -> None:
        """Takes in what the router knows of the network."""
        self._paths = {(path.source, path.target): path for path in paths}

    def take(self, ingress: str, figures: Iterable[Figures], now_s: float) -> None:
        """Takes in what a replica has counted. Its first report is what later ones are compared with."""
        counts = _counts(figures)
        before, self._counts[ingress] = self._counts.get(ingress), counts
        if before is None:
            return
        grown = _Moved(*map(_grown, before, counts))
        self._moved.append((now_s, grown))
        for (source, target), transfers in grown.pair_transfers.items():
            if transfers:
                pair = source, target
                self._totals[pair] = self._totals.pop(pair, 0) + round(transfers)
        while len(self._totals) > 4 * MOST_PAIRS:
            self._totals.popitem(last=False)

    def lost(self, ingress: str) -> None:
        """Forgets what a replica had counted whose connection has ended."""
        self._counts.pop(ingress, None)

    def add(self, request: str, attempt: Attempt, pair: Pair, at_s: float) -> None:
        """Takes in how long the transfer of an attempt took that ended at `at_s` between the nodes of `pair`."""
        self._timed.append(_Timed(at_s, attempt.transfer_s, attempt.held_s, attempt.level))
        path = self._paths.get(pair)
        shown = {
            "id": request,
            "at": round(at_s, 3),
            "from": attempt.prefill_engine,
            "to": attempt.decode_engine,
            "bytes": attempt.transfer_bytes,
            "seconds": round(attempt.transfer_s, 6),
            "held_s": round(attempt.held_s, 6),
            "level": attempt.level,
            "tier": None if path is None else path.tier,
        }
        if len(self._slowest) < SLOWEST or attempt.transfer_s > self._slowest[-1]["seconds"]:
            self._slowest = sorted([*self._slowest, shown], key=lambda one: -one["seconds"])[:SLOWEST]

    def tick(self, now_s: float, nodes: Set[str]) -> None:
        """Forgets what is older than the window, and slow transfers of long ago. A pair is shown while both of its
        nodes are among `nodes`; a router that has just restarted knows none for a moment.
        """
        while self._moved and self._moved[0][0] <= now_s - WINDOW_S:
            self._moved.popleft()
        while self._timed and self._timed[0].at_s < now_s - WINDOW_S:
            self._timed.popleft()
        self._nodes = {OTHER, *nodes}
        if self._slowest and min(one["at"] for one in self._slowest) < now_s - SLOWEST_FOR_S:
            self._slowest = [one for one in self._slowest if one["at"] >= now_s - SLOWEST_FOR_S]

    def by_tier(self) -> dict[str, Value]:
        """Returns the series of bytes per second by tier; those of transfers whose tier is not known are of the tier
        `unknown`.
        """
        rates = _rates(moved.tier_bytes for _, moved in self._moved)
        return {f"bytes_per_s/tier/{tier}": rate for (tier,), rate in rates.items()}

    def shown(self, levels: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns all of it for the page; `levels` are the priority levels of the flow scheduler, to which the time is
        added that the window's transfers were held at each.
        """
        rates: dict[Pair, float] = {
            (source, target): rate
            for (source, target), rate in _rates(moved.pair_bytes for _, moved in self._moved).items()
        }
        there = (pair for pair in {*rates, *self._paths, *self._totals} if self._is_there(pair))
        pairs = sorted(there, key=lambda pair: (-rates.get(pair, 0.0), pair))
        seconds = sorted(one.seconds for one in self._timed)
        held = sorted(one.held_s for one in self._timed)
        return {
            "pairs": [self._pair(pair, rates.get(pair, 0.0)) for pair in pairs[:MOST_PAIRS]],
            "slowest": self._slowest,
            "seconds": {"p50": quantile(seconds, 0.5), "p95": quantile(seconds, 0.95)},
            "held_s": {"p50": quantile(held, 0.5), "p95": quantile(held, 0.95)},
            "levels": [{**one, "held_s": self._held_s(one["level"])} for one in levels],
        }

    def _held_s(self, level: int) -> Value:
        """Returns the 95th percentile of the time that the window's transfers at a level were held back."""
        return quantile(sorted(one.held_s for one in self._timed if one.level == level), 0.95)

    def _is_there(self, pair: Pair) -> bool:
        """Returns whether both nodes of a pair have engines."""
        return self._nodes >= set(pair)

    def _pair(self, pair: Pair, rate: float) -> dict[str, Any]:
        path = self._paths.get(pair)
        return {
            "from": pair[0],
            "to": pair[1],
            "tier": None if path is None else path.tier,
            "bytes_per_s": round(rate, 1),
            "learnt_bytes_per_s": None if path is None else path.learnt_bytes_per_s,
            "configured_bytes_per_s": None if path is None else path.configured_bytes_per_s,
            "transfers": self._totals.get(pair, 0),
        }


def _counts(figures: Iterable[Figures]) -> _Moved:
    """Returns what a replica has counted; what it does not count is empty."""
    wanted = {TIER_BYTES: TIER, PAIR_BYTES: PAIR, PAIR_TRANSFERS: PAIR}
    found: dict[str, dict[Labels, float]] = {
        one.name: {labels: count for labels, (count,) in one.series}
        for one in figures
        if wanted.get(one.name) == one.labels
    }
    return _Moved(*(found.get(name, {}) for name in wanted))


def _grown(before: dict[Labels, float], counts: dict[Labels, float]) -> dict[Labels, float]:
    """Returns by how much each series has grown; one that has fallen began again at 0."""
    return {
        labels: count - (then if (then := before.get(labels, 0.0)) <= count else 0.0)
        for labels, count in counts.items()
    }


def _rates(grown: Iterable[dict[Labels, float]]) -> dict[Labels, float]:
    """Returns the rate of each series over the window."""
    total: dict[Labels, float] = {}
    for one in grown:
        for labels, n_bytes in one.items():
            total[labels] = total.get(labels, 0.0) + n_bytes
    return {labels: n_bytes / WINDOW_S for labels, n_bytes in total.items()}
