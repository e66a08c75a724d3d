"""BR-H with expected departures in place of a gate, for the experiment `forecast_value` only.

The paper lets a request leave the projection if p passes a gate, and stay otherwise. Here the share p of every running
request leaves, at the step mu that is forecast for the case that it ends within the window:

    L_g(h) = sum over the requests r of g of (s_r + a_r) (1 - p_r [h >= mu_r]) + h * (requests of g)

    p_r, mu_r   the predictor's last answer; mu_r counts down with each token, and is 1 at least
    the rest    as in `policies.routing.balance.balance_route_h`, whose other extras are off

No policy of `policies` has this: a forecast there is one step or none, and the requests of a worker are summed. So the
policy here reads the answers beside the reducer, which only a simulation can do. If it gains, that is a reason to build
it; until then it costs the live router nothing.

Not claimed: the growth of what has left. A share that leaves still grows by one token a step, which is a ten
thousandth of a long context over the whole window.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from policies.routing.balance.balance_route_h import BalanceRouteH
from policies.routing.balance.round import balance
from policies.routing.balance.stages import Aim, StageLimits, groups
from policies.routing.base import Assignment, Feasible, Needs
from policies.state.reducer import ClusterState
from policies.state.views import Departure, Snapshot, WorkerId
from predictors.protocol import Features, IntArray, Outcome, Prediction, Predictor


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a predictor about one request at an age."""

    age: int
    p_finish: float
    remaining_tokens: float


class Remembered:
    """A predictor that passes another's answers on, and remembers the last one about each running request.

    `answers` maps request ids to them. The answers at arrival, which include the total length, are not remembered.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self.name, self.windows = predictor.name, predictor.windows
        self.answers: dict[str, Answer] = {}

    def observe(self, outcome: Outcome) -> None:
        """Forgets the request and lets the other predictor learn from it."""
        self.answers.pop(outcome.arrival.request_id, None)
        self._predictor.observe(outcome)

    def predict(
        self, features: Sequence[Features], ages: IntArray, window_tokens: int, with_total: bool = False
    ) -> Prediction:
        """See `Predictor.predict`."""
        made = self._predictor.predict(features, ages, window_tokens, with_total)
        if not with_total:
            rows = zip(
                features,
                ages.tolist(),
                made.p_finish.tolist(),
                made.mean_remaining_tokens.tolist(),
                strict=True,
            )
            for f, age, p, mu in rows:
                self.answers[f.arrival.request_id] = Answer(age, p, mu)
        return made


@dataclass(frozen=True, slots=True)
class ExpectedBalanceRouteH:
    """BR-H whose projection lets each running request leave in part, by its chance to end (see the module).

    `state` is that of the simulated router, and `remembered` its predictor.
    """

    paper: ClassVar[str] = "BalanceRoute 4, algorithm 3, with another projection"
    formula: ClassVar[str] = BalanceRouteH.formula
    needs: ClassVar[Needs] = Needs.NONE
    rule: BalanceRouteH
    state: ClusterState
    remembered: Remembered
    name: str = "expected_balance_route_h"

    @property
    def horizon(self) -> int:
        """The number of decode steps that the lookahead covers, for which forecasts are made."""
        return self.rule.horizon

    def assign(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        rule, gone = self.rule, self.departures()
        aim = Aim(rule.horizon, rule.gamma, rule.alpha, rule.beta)
        limits = StageLimits(
            rule.window, rule.abundance, rule.reserve_tokens, rule.ageing_s, rule.pool_wide, rule.max_wait_s
        )
        assigned: tuple[Assignment, ...] = ()
        for entries, workers in groups(feasible, snapshot):
            expected = [replace(worker, departures=gone.get(worker.id, ())) for worker in workers]
            assigned += balance(entries, snapshot, expected, aim, limits, rng)
        return assigned

    def departures(self) -> dict[WorkerId, tuple[Departure, ...]]:
        """Returns the expected departures of each worker: KV tokens by step, in ascending order of steps.

        They name no sequences, because a share of one is no whole number.
        """
        tokens: dict[WorkerId, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        state = self.state
        for request_id, answer in self.remembered.answers.items():
            worker, request = state.decode_worker(request_id), state.request(request_id)
            if worker is None or request is None or not answer.p_finish:
                continue
            generated = state.generated(request_id)
            step = max(1, math.ceil(answer.remaining_tokens - (generated - answer.age)))
            tokens[worker][step] += answer.p_finish * (request.prompt_tokens + generated)
        return {
            worker: tuple(Departure(step, 0, round(of[step])) for step in sorted(of))
            for worker, of in tokens.items()
        }
