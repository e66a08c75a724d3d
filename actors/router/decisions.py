"""What the router decided and how long it took: a ring of the last decisions, counters, and a histogram of times."""

import bisect
from collections import Counter, OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Any

from policies.dispatch import Action, Reject, RouteDecode, RoutePrefill
from policies.state.views import RequestId

DECISION_BOUNDS_S = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3)


@dataclass(slots=True)
class DecisionLog:
    """Keeps the actions of the last `capacity` requests, oldest dropped first, and totals for ever."""

    capacity: int = 4096
    totals: Counter[str] = field(default_factory=Counter)
    buckets: list[int] = field(default_factory=lambda: [0] * (len(DECISION_BOUNDS_S) + 1))
    sum_s: float = 0.0
    _ring: OrderedDict[RequestId, list[tuple[float, Action]]] = field(default_factory=OrderedDict)

    def record(self, now_s: float, actions: list[Action], took_s: float) -> None:
        """Logs what one event led to. `took_s` is shared evenly by its actions."""
        for action in actions:
            self.totals[_label(action)] += 1
            self.sum_s += took_s / len(actions)
            self.buckets[bisect.bisect_left(DECISION_BOUNDS_S, took_s / len(actions))] += 1
            self._ring.setdefault(action.rid, []).append((now_s, action))
            if len(self._ring) > self.capacity:
                self._ring.popitem(last=False)

    def cumulative(self) -> tuple[int, ...]:
        """Counts at or below each bound, +Inf last, as Prometheus wants them."""
        total, result = 0, []
        for count in self.buckets:
            total += count
            result.append(total)
        return tuple(result)

    def explain(self, rid: RequestId) -> list[dict[str, Any]]:
        """The decisions made for a request, oldest first; empty when unknown or already dropped from the ring."""
        return [
            {"at_s": now_s, "action": type(action).__name__, **asdict(action)}
            for now_s, action in self._ring.get(rid, [])
        ]


def _label(action: Action) -> str:
    match action:
        case RoutePrefill(degraded=True):
            return "prefill_degraded"
        case RoutePrefill(colocated=True):
            return "prefill_colocated"
        case RoutePrefill():
            return "prefill"
        case RouteDecode():
            return f"decode_{action.decision.reason.value}"
        case Reject():
            return f"reject_{action.reason}"
