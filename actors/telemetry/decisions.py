"""The router's part of the trace of a sampled request: a span for each decision, with its ranking.

The span lasts as long as the dispatcher took. Its events `candidate` are the ranking, best first, each with the worker,
its cost and the terms of the cost.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode

from actors.telemetry.export import Attributes, Exports, Result, Scribe, context_of
from policies.dispatch.dispatcher import Action, Reject, RoutePrefill
from policies.routing.base import Reason

MOST_RANKED = 16
"""Most candidates of a ranking that a span shows. ASSUMPTION: the best few explain a decision; `explain` has all."""

_OWN = frozenset({Reason.LEASE_RESCUE, Reason.PROBE})
"""Reasons of decisions that the dispatcher makes without a policy."""


class DecisionTraces(Exports):
    """The decisions about sampled attempts. `totals` counts decisions whose spans were exported, failed or were
    dropped. `now_s` is the clock of the events.
    """

    def __init__(
        self, exporter: SpanExporter, attributes: Mapping[str, str], now_s: Callable[[], float]
    ) -> None:
        self.totals: Counter[str] = Counter(exported=0, dropped=0, failed=0)
        super().__init__(exporter, self._counted, attributes, now_s)
        self._followed: dict[str, str] = {}

    def _counted(self, result: Result, number: int) -> None:
        self.totals[result] += number

    def follow(self, attempt_id: str, traceparent: str | None) -> None:
        """Notes the place of an attempt's request in its trace, if the request is sampled."""
        if traceparent is not None:
            self._followed[attempt_id] = traceparent

    def forget(self, attempt_id: str) -> None:
        """Forgets an attempt that has ended."""
        self._followed.pop(attempt_id, None)

    def decided(
        self, at_s: float, took_s: float, actions: Sequence[Action], prefill: str, decode: str
    ) -> None:
        """Takes the actions that one event at `at_s` led to after `took_s`, by policies of these names."""
        if not self._followed:
            return
        for action in actions:
            traceparent = self._followed.get(action.attempt_id)
            if traceparent is None:
                continue
            policy = prefill if isinstance(action, RoutePrefill) else decode
            told = partial(write, traceparent, action, policy, at_s, took_s)
            if self.put(told) == "dropped":
                self.totals["dropped"] += 1


def write(traceparent: str, action: Action, policy: str, at_s: float, took_s: float, scribe: Scribe) -> None:
    """Starts and ends the span of one decision, which the dispatcher began at `at_s` and made in `took_s`."""
    attributes: dict[str, str | int | float | bool] = {"sluice.attempt": action.attempt_id}
    if isinstance(action, Reject):
        name = "reject"
        attributes |= {"sluice.reason": action.reason, "http.response.status_code": action.status}
    else:
        name = "decide prefill" if isinstance(action, RoutePrefill) else "decide decode"
        decision = action.decision
        attributes |= {
            "sluice.policy": "dispatcher" if decision.reason in _OWN else policy,
            "sluice.reason": str(decision.reason),
            "sluice.worker": decision.worker,
            "sluice.candidates": len(decision.ranking),
            "sluice.waited_seconds": action.waited_s,
        }
        if isinstance(action, RoutePrefill):
            attributes["sluice.colocated"] = action.colocated
    start_ns, end_ns = scribe.wall_ns(at_s), scribe.wall_ns(at_s + took_s)
    span = scribe.tracer.start_span(
        name, context_of(traceparent), SpanKind.INTERNAL, attributes, start_time=start_ns
    )
    if isinstance(action, Reject):
        span.set_status(Status(StatusCode.ERROR, action.reason))
    else:
        for rank, one in enumerate(action.decision.ranking[:MOST_RANKED]):
            terms = {f"term.{name}": float(value) for name, value in one.terms.items()}
            told: Attributes = {"rank": rank, "worker": one.worker, "cost": float(one.cost), **terms}
            span.add_event("candidate", told, start_ns)
    span.end(end_ns)
