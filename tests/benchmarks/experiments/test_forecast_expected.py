"""Expected departures: what is remembered of a predictor's answers, and what leaves a worker, by hand."""

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.experiments.forecast_expected import Answer, ExpectedBalanceRouteH, Remembered
from policies.routing.balance.balance_route_h import BalanceRouteH
from policies.routing.base import LooksAhead
from policies.state.reducer import ClusterState
from predictors.features import FeatureTracker
from predictors.oracle import Oracle
from predictors.protocol import Arrival, Outcome
from tests.policies.routing.views import entry, snapshot, worker


class State:
    """A reducer's answers about requests a and b on worker w and c, which is in the pool."""

    def decode_worker(self, attempt_id: str) -> str | None:
        return {"a": "w", "b": "w"}.get(attempt_id)

    def request(self, attempt_id: str) -> Any:
        return {"a": SimpleNamespace(prompt_tokens=100), "b": SimpleNamespace(prompt_tokens=50)}.get(
            attempt_id
        )

    def generated(self, attempt_id: str) -> int:
        return {"a": 20, "b": 10}[attempt_id]


def test_shares_of_requests_leave_by_hand() -> None:
    """a has made 4 tokens since it had 7.5 to come: it leaves in ceil(3.5) = 4 steps, with 0.75 of 120 tokens. b was to
    leave long ago and is still there: in 1 step, 0.1 of 60. The pool's c runs nowhere, and nothing is known of d.
    """
    remembered = Remembered(Oracle({}))
    remembered.answers = {
        "a": Answer(16, 0.75, 7.5),
        "b": Answer(0, 0.1, 2.0),
        "c": Answer(0, 0.5, 9.0),
        "d": Answer(0, 0.5, 9.0),
    }
    policy = ExpectedBalanceRouteH(BalanceRouteH(), cast(ClusterState, State()), remembered)
    assert policy.departures() == {"w": ((1, 0, 6), (4, 0, 90))}
    assert isinstance(policy, LooksAhead) and policy.horizon == BalanceRouteH().horizon


def test_the_last_answer_about_each_running_request_is_remembered() -> None:
    tracker = FeatureTracker()
    features = [tracker.arrive(Arrival(name, 0.0, 10)) for name in ("a", "b")]
    remembered = Remembered(Oracle({"a": 30, "b": 500}))
    remembered.predict(features, np.array([0, 0]), 48, with_total=True)
    assert remembered.answers == {}
    remembered.predict(features, np.array([10, 20]), 48)
    remembered.predict(features[:1], np.array([16]), 48)
    assert remembered.answers == {"a": Answer(16, 1.0, 14.0), "b": Answer(20, 0.0, 48.0)}
    remembered.observe(Outcome(features[0].arrival, 30, 1.0))
    assert set(remembered.answers) == {"b"}


@pytest.mark.parametrize(("p", "chosen"), [(1.0, "a"), (0.1, "b"), (0.0, "b")])
def test_a_likely_departure_moves_the_next_request(p: float, chosen: str) -> None:
    """Loads are 100, 90 and 200, and c has no slot. If 60 tokens of a and all of c leave after one step, the envelope
    is b's 90, under which b has no margin and a has 50: a is first. With a chance of 0.1 the envelope is c's 180, and
    b, which has less than a's 94, is first.
    """

    class Running(State):
        def decode_worker(self, attempt_id: str) -> str | None:
            return {"of a": "a", "of c": "c"}[attempt_id]

        def request(self, attempt_id: str) -> Any:
            return SimpleNamespace(prompt_tokens={"of a": 60, "of c": 200}[attempt_id])

        def generated(self, attempt_id: str) -> int:
            return 0

    remembered = Remembered(Oracle({}))
    remembered.answers = {name: Answer(0, p, 1.0) for name in ("of a", "of c")}
    policy = ExpectedBalanceRouteH(BalanceRouteH(), cast(ClusterState, Running()), remembered)
    workers = [
        worker(name, slots=3, slots_used=used, kv_tokens=tokens, barrier="x")
        for name, used, tokens in (("a", 2, 100), ("b", 2, 90), ("c", 3, 200))
    ]
    new = entry("new", 10)
    [assigned] = policy.assign([(new, workers[:2])], snapshot(workers, [new]), random.Random(0))
    assert assigned.decision.worker == chosen
