"""KV transfers between nodes, from the requests that ingresses kept and from what the router knows of the network."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from actors.telemetry.facts import Attempt
from actors.wire.messages import PathSeen
from app.dashboard.ingresses import WINDOW_S
from app.dashboard.rings import Value, quantile

SLOWEST = 10
SLOWEST_FOR_S = 900.0
MOST_PAIRS = 64
"""Pairs of nodes that the page shows, those with most bytes first."""

Pair = tuple[str, str]


class _Moved(NamedTuple):
    at_s: float
    pair: Pair
    n_bytes: int
    seconds: float
    held_s: float
    level: int | None


class Transfers:
    """The transfers of the window by pair of nodes, and the slowest ones of the last 15 minutes."""

    def __init__(self) -> None:
        self._moved: deque[_Moved] = deque()
        self._totals: OrderedDict[Pair, int] = OrderedDict()
        self._slowest: list[dict[str, Any]] = []
        self._paths: dict[Pair, PathSeen] = {}

    def paths(self, paths: Sequence[PathSeen]) -> None:
        """Takes in what the router knows of the network."""
        self._paths = {(path.source, path.target): path for path in paths}

    def add(self, request: str, attempt: Attempt, pair: Pair, at_s: float) -> None:
        """Counts the transfer of an attempt that ended at `at_s` between the nodes of `pair`."""
        self._moved.append(
            _Moved(at_s, pair, attempt.transfer_bytes, attempt.transfer_s, attempt.held_s, attempt.level)
        )
        self._totals[pair] = self._totals.pop(pair, 0) + 1
        if len(self._totals) > 4 * MOST_PAIRS:
            self._totals.popitem(last=False)
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

    def tick(self, now_s: float) -> None:
        """Forgets what is older than the window, and slow transfers of long ago."""
        while self._moved and self._moved[0].at_s < now_s - WINDOW_S:
            self._moved.popleft()
        if self._slowest and min(one["at"] for one in self._slowest) < now_s - SLOWEST_FOR_S:
            self._slowest = [one for one in self._slowest if one["at"] >= now_s - SLOWEST_FOR_S]

    def by_tier(self) -> dict[str, Value]:
        """Returns bytes per second by tier, as far as tiers are known."""
        found: dict[str, Value] = {}
        for one in self._moved:
            path = self._paths.get(one.pair)
            if path is not None and path.tier is not None:
                name = f"bytes_per_s/tier/{path.tier}"
                found[name] = (found.get(name) or 0.0) + one.n_bytes / WINDOW_S
        return found

    def shown(self, levels: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns all of it for the page; `levels` are the priority levels of the flow scheduler, to which the time is
        added that the window's transfers were held at each.
        """
        rates: dict[Pair, float] = {}
        for one in self._moved:
            rates[one.pair] = rates.get(one.pair, 0.0) + one.n_bytes / WINDOW_S
        pairs = sorted({*rates, *self._paths, *self._totals}, key=lambda pair: (-rates.get(pair, 0.0), pair))
        seconds = sorted(one.seconds for one in self._moved)
        held = sorted(one.held_s for one in self._moved)
        return {
            "pairs": [self._pair(pair, rates.get(pair, 0.0)) for pair in pairs[:MOST_PAIRS]],
            "slowest": self._slowest,
            "seconds": {"p50": quantile(seconds, 0.5), "p95": quantile(seconds, 0.95)},
            "held_s": {"p50": quantile(held, 0.5), "p95": quantile(held, 0.95)},
            "levels": [{**one, "held_s": self._held_s(one["level"])} for one in levels],
        }

    def _held_s(self, level: int) -> Value:
        """Returns the 95th percentile of the time that the window's transfers at a level were held back."""
        return quantile(sorted(one.held_s for one in self._moved if one.level == level), 0.95)

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
