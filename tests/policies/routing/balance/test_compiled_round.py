"""The compiled round makes the decisions of `stages.Round`: order, sets, reasons, terms and rankings, bit for bit."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.decisions.cases import tick_case
from policies.routing.balance.balance_route_0 import BalanceRoute0
from policies.routing.balance.balance_route_h import BalanceRouteH
from policies.routing.balance.compiled_round import quick_round
from policies.routing.balance.loads import Aim, FlatLoads, HorizonLoads
from policies.routing.balance.stages import Feasible, Round, StageLimits
from policies.routing.balance.subset import FEW
from policies.routing.base import Assignment, Reason
from policies.state.views import Departure, PoolEntry, Snapshot, Worker
from tests.policies.routing.views import entry, snapshot, worker

RESERVE = 3


@dataclass(frozen=True)
class Fleet:
    """A random group and pool, by a seed: loads, barriers, forecasts; sizes with many equal ones, ages, priorities."""

    seed: int
    workers: int
    pool: int
    barriers: int = 1
    sequences: int = 1
    priorities: int = 1
    lists: int = 1  # how many different lists of workers entries may go to
    sizes: int = 60  # largest prompt

    def build(self) -> tuple[Snapshot, list[tuple[PoolEntry, Sequence[Worker]]], list[Worker]]:
        rng = random.Random(self.seed)
        workers = [self._worker(i, rng) for i in range(self.workers)]
        lists = [workers] + [
            sorted(rng.sample(workers, rng.randint(1, len(workers))), key=lambda w: w.id)
            for _ in range(self.lists - 1)
        ]
        entries = [
            entry(
                f"r{i}",
                rng.randint(1, self.sizes),
                entered_s=rng.choice([0.0, 3.0, rng.uniform(0.0, 100.0)]),
                slots=rng.randint(1, self.sequences),
                priority=rng.randrange(self.priorities),
            )
            for i in range(self.pool)
        ]
        return snapshot(workers, entries, now_s=100.0), [(e, rng.choice(lists)) for e in entries], workers

    def _worker(self, i: int, rng: random.Random) -> Worker:
        used = rng.randint(0, 12)
        load = rng.choice([0, 100, rng.randint(0, 500)]) if used else 0
        steps = sorted(rng.sample(range(1, 12), rng.randint(0, min(4, used))))
        departures = tuple(Departure(h, 1, rng.randint(0, load // max(1, len(steps)))) for h in steps)
        return worker(
            f"w{i:03d}",
            slots=12,
            slots_used=used,
            kv_tokens=load,
            kv_capacity_tokens=rng.choice([load + 20, load + 200, 10_000]),
            departures=departures,
            barrier=f"b{rng.randrange(self.barriers)}",
        )


FLEETS = st.builds(
    Fleet,
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 8),
    pool=st.integers(1, 40),
    barriers=st.integers(1, 3),
    sequences=st.integers(1, 3),
    priorities=st.integers(1, 3),
    lists=st.integers(1, 4),
    sizes=st.sampled_from([3, 60, 400]),
)
LIMITS = st.builds(
    StageLimits,
    window=st.integers(1, 9),
    abundance=st.sampled_from([0.0, 1.0, 4.0, 99.0]),
    max_wait_s=st.sampled_from([0.0, 10.0, 99.0, 1000.0]),
    reserve_tokens=st.sampled_from([0, RESERVE]),
    ageing=st.sampled_from([0.0, 0.3, 20.0]),
)
AIMS = st.builds(
    Aim,
    horizon=st.sampled_from([0, 1, 7, 30]),
    gamma=st.sampled_from([0.5, 0.9, 1.0]),
    alpha=st.sampled_from([0.3, 1.0]),
    beta=st.sampled_from([None, 0.0, 2.5]),
    slack_tokens=st.sampled_from([0.0, 4.7]),
)


def both(
    feasible: Feasible, view: Snapshot, workers: Sequence[Worker], aim: Aim, limits: StageLimits
) -> tuple[tuple[Assignment, ...], tuple[Assignment, ...]]:
    """The compiled round's and the other's, from equal generators, which they must use alike."""
    rngs = random.Random(5), random.Random(5)
    loads = HorizonLoads(workers, *aim)
    made = quick_round(feasible, view, workers, aim, limits, rngs[0])
    expected = Round(feasible, view, loads, limits, rngs[1]).run()
    assert rngs[0].getstate() == rngs[1].getstate()
    return made, expected


@settings(max_examples=600, deadline=None)
@given(FLEETS, LIMITS, AIMS)
def test_it_decides_as_the_round_without_arrays(fleet: Fleet, limits: StageLimits, aim: Aim) -> None:
    view, feasible, workers = fleet.build()
    made, expected = both(feasible, view, workers, aim, limits)
    assert made == expected
    assert repr(made) == repr(expected)  # types and signs of zero too: it is what a journal would hold


@settings(max_examples=300, deadline=None)
@given(FLEETS, LIMITS)
def test_br_0_is_the_same_with_whole_numbers(fleet: Fleet, limits: StageLimits) -> None:
    view, feasible, workers = fleet.build()
    made = quick_round(feasible, view, workers, Aim(), limits, random.Random(5))
    assert made == Round(feasible, view, FlatLoads(workers), limits, random.Random(5)).run()


@settings(max_examples=100, deadline=None)
@given(FLEETS, st.sampled_from([BalanceRoute0, BalanceRouteH]))
def test_a_window_too_wide_for_it_sees_no_more_of_a_pool_that_fits_both(
    fleet: Fleet, kind: type[BalanceRoute0 | BalanceRouteH]
) -> None:
    view, feasible, _ = dataclasses.replace(fleet, pool=FEW).build()
    compiled = kind(window=FEW, max_wait_s=99.0).assign(feasible, view, random.Random(5))
    assert kind(window=FEW + 1, max_wait_s=99.0).assign(feasible, view, random.Random(5)) == compiled


def test_the_random_cases_reach_every_reason_and_sets_of_several() -> None:
    reasons: set[Reason] = set()
    largest = 0
    for seed in range(20):
        fleet = Fleet(seed, workers=6, pool=30, barriers=1 + seed % 2)
        view, feasible, workers = fleet.build()
        limits = StageLimits(8, [0.0, 2.0, 99.0][seed % 3], 99.0, RESERVE)
        made, expected = both(feasible, view, workers, Aim(7, 0.9), limits)
        assert made == expected
        reasons |= {a.decision.reason for a in made}
        largest = max(largest, *(int(a.decision.ranking[0].terms["set_size"]) for a in made))
    assert reasons == {Reason.FILL, Reason.BEST_SUBSET, Reason.LEAST_HARM, Reason.OVERDUE}
    assert largest >= 3


@pytest.mark.parametrize(("workers", "pool", "busy"), [(64, 256, True), (144, 300, True), (32, 400, False)])
@pytest.mark.parametrize("aim", [Aim(), Aim(48, 0.9), Aim(96, 1.0, 1.0, 30.0, 200.0)])
def test_large_ticks_are_the_same(workers: int, pool: int, busy: bool, aim: Aim) -> None:
    for seed in range(2):
        case = tick_case(workers, pool, random.Random(seed), busy)
        decode = [w for w in case.snapshot.workers.values() if w.id.startswith("d")]
        limits = StageLimits(8, 2.0, 10.0, 16, 0.1 * seed)
        made, expected = both(case.feasible, case.snapshot, decode, aim, limits)
        assert made == expected
        assert len(made) > 50
