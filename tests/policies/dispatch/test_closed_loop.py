"""Policies in a closed loop through the dispatcher, step by step: BalanceRoute's promises on a small cluster.

The cluster has 16 decode workers of 16 slots that never run empty, heavy-tailed prompts and outputs, and a pool of 48.
In every step each request gains a token, and a request that finishes frees its slots at once. The imbalance is the mean
over the steps of max - min KV load, as in the paper. Time is not simulated: all steps are alike, and transfers take no
time.
"""

import random

import pytest

from policies.dispatch.dispatcher import Action, DispatchConfig, Dispatcher, RouteDecode
from policies.routing.registry import decode_policy
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.state import events as ev
from policies.state.views import Request, Role

WORKERS, SLOTS, POOL, STEPS, WARM_UP = 16, 16, 48, 220, 80


class Loop:
    """The dispatcher and its cluster. With `forecast` H > 0, BR-H gets the true remaining length of each request that
    finishes within H steps, every 16 tokens.
    """

    def __init__(self, policy: str, forecast: int = 0, **params: bool) -> None:
        config = DispatchConfig(max_queue=10**6, queue_timeout_s=1e9, starvation_s=1e9, lease_margin_s=0.0)
        self.dispatcher = Dispatcher(config, JoinShortestQueue(), decode_policy(policy, params))
        self.rng, self.forecast, self.now_s = random.Random(5), forecast, 0.0
        self.output: dict[str, int] = {}
        self.tokens: dict[str, int] = {}  # generated, by decoding request
        self.dispatcher.handle(ev.EngineUp(0.0, "p", Role.PREFILL, "g", "n", 10**6, 10**9))
        for i in range(WORKERS):
            self.dispatcher.handle(ev.EngineUp(0.0, f"d{i:02d}", Role.DECODE, "g", "n", SLOTS, 10**7))
        self.report()

    def handle(self, event: ev.Event) -> list[Action]:
        actions = self.dispatcher.handle(event)
        self.tokens |= {action.attempt_id: 0 for action in actions if isinstance(action, RouteDecode)}
        return actions

    def report(self) -> None:
        self.reported_s = self.now_s
        for worker in self.dispatcher.state.snapshot(self.now_s).workers:
            self.dispatcher.handle(ev.EngineStatus(self.now_s, worker, 0, 0, 0))

    def arrive(self) -> None:
        attempt_id = f"r{len(self.output)}"
        prompt = min(20_000, int(self.rng.lognormvariate(7, 1)))
        self.output[attempt_id] = max(4, min(1500, int(self.rng.lognormvariate(4.6, 0.9))))
        self.handle(ev.Arrived(self.now_s, Request(attempt_id, self.now_s, prompt, 2000)))
        self.handle(ev.PrefillDone(self.now_s, attempt_id, 1e9, 1, 0))

    def step(self) -> int:
        """Runs one decode step and returns max - min KV load after it."""
        self.now_s += 0.05
        if self.reported_s + 1.0 <= self.now_s:
            self.report()
        for attempt_id in list(self.tokens):
            self.tokens[attempt_id] += 1
            done, left = self.tokens[attempt_id], self.output[attempt_id] - self.tokens[attempt_id]
            if left == 0:
                del self.tokens[attempt_id]
                self.handle(ev.Closed(self.now_s, attempt_id, "finished", done))
                continue
            self.handle(ev.Progressed(self.now_s, attempt_id, done))
            if self.forecast and done % 16 == 1:
                finishes_in = float(left) if left <= self.forecast else None
                self.handle(ev.ForecastMade(self.now_s, attempt_id, done, finishes_in))
        while self.dispatcher.state.pool_size < POOL:
            self.arrive()
        workers = self.dispatcher.state.snapshot(self.now_s).workers.values()
        loads = [worker.kv_tokens for worker in workers if worker.role is Role.DECODE]
        return max(loads) - min(loads)

    def mean_imbalance(self) -> float:
        kept = [self.step() for _ in range(STEPS)][WARM_UP:]
        return sum(kept) / len(kept)


@pytest.fixture(scope="module")
def shortest_queue() -> float:
    return Loop("join_shortest_queue").mean_imbalance()


@pytest.fixture(scope="module")
def balance_route_0() -> float:
    return Loop("balance_route_0").mean_imbalance()


def test_br_0_is_well_below_join_shortest_queue(shortest_queue: float, balance_route_0: float) -> None:
    """The paper's form takes single entries of the window, the other reading those of the whole pool."""
    assert balance_route_0 * 1.9 < shortest_queue
    pool_wide = Loop("balance_route_0", pool_wide=True).mean_imbalance()
    assert pool_wide * 2 < shortest_queue


def test_br_h_with_true_forecasts_is_below_br_0(balance_route_0: float) -> None:
    assert Loop("balance_route_h", forecast=48).mean_imbalance() < balance_route_0


def test_the_composition_without_a_network_to_weigh_stays_below_join_shortest_queue_too(
    shortest_queue: float,
) -> None:
    assert Loop("composition", forecast=48).mean_imbalance() * 2 < shortest_queue


def test_a_run_is_repeated_exactly_by_its_seed() -> None:
    first, second = Loop("balance_route_h", forecast=48), Loop("balance_route_h", forecast=48)
    assert [first.step() for _ in range(40)] == [second.step() for _ in range(40)]
