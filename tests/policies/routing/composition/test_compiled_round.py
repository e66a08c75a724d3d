"""The composition's compiled round decides as the plain one: order, sets, reasons, terms and rankings, bit for bit."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.decisions.cases import tick_case
from policies.network.oracle import NodePlace, Oracle, PairEstimate
from policies.routing.balance.stages import Feasible, split_by_group
from policies.routing.base import Assignment, Reason
from policies.routing.composition.composition import Composition
from policies.state.views import Departure, PoolEntry, Role, Snapshot, Transfers, TypicalEntry, Worker
from tests.policies.routing.views import entry, snapshot, worker

MB = 1_000_000
NOW_S = 100.0


@dataclass(frozen=True)
class Fleet:
    """A random cluster and pool, by a seed: loads, barriers, forecasts, paths; many equal sizes; ages, priorities."""

    seed: int
    workers: int
    pool: int
    barriers: int = 1
    sequences: int = 1
    priorities: int = 1
    lists: int = 1  # how many different lists of workers entries may go to
    sizes: int = 60  # largest prompt
    network: str = "tiers"
    forecasts: str = "some"
    alike: bool = False  # all workers and entries are, so that draws decide

    def build(self) -> tuple[Snapshot, list[tuple[PoolEntry, Sequence[Worker]]]]:
        rng = random.Random(self.seed)
        workers = [self._worker(i, rng) for i in range(self.workers)]
        senders = [self._sender(i, rng) for i in range(3)]
        lists = [workers] + [
            sorted(rng.sample(workers, rng.randint(1, len(workers))), key=lambda w: w.id)
            for _ in range(self.lists - 1)
        ]
        lists += [list(lists[0])] if self.lists > 1 else []  # equal, but another object
        pool = [self._entry(i, rng) for i in range(self.pool)]
        hits = {e.request.attempt_id: self._hits(e, workers, rng) for e in pool if rng.random() < 0.5}
        view = snapshot([*senders, *workers], pool, self._oracle(rng), hits, NOW_S)
        usual = (
            None
            if self.forecasts == "no usual"
            else TypicalEntry(rng.choice([0.0, 5.0 * MB]), self._usual(rng))
        )
        return dataclasses.replace(view, typical=usual), [(e, rng.choice(lists)) for e in pool]

    def _usual(self, rng: random.Random) -> float | None:
        return None if self.forecasts == "none" else rng.choice([100.0, 33.3])

    def _worker(self, i: int, rng: random.Random) -> Worker:
        used = 7 if self.alike else rng.randint(0, 13)
        load = 100 if self.alike else rng.choice([0, 100, rng.randint(0, 500)]) if used else 0
        steps = [] if self.alike else sorted(rng.sample(range(1, 12), rng.randint(0, min(4, used))))
        return worker(
            f"w{i:03d}",
            slots=12 if self.alike else rng.choice([12, 12, 16]),
            slots_used=used,
            kv_tokens=load,
            kv_capacity_tokens=10_000 if self.alike else rng.choice([load + 20, load + 200, 10_000]),
            foreign_kv_tokens=0 if self.alike else rng.choice([0, 0, 15]),
            departures=tuple(Departure(h, 1, rng.randint(0, load // max(1, len(steps)))) for h in steps),
            engine_running=None if self.alike else rng.choice([None, 3, 20]),
            engine_waiting=rng.choice([None, 2]),
            barrier=f"b{rng.randrange(self.barriers)}" if self.barriers > 1 else "",
            node="n" if self.alike else f"n{i % 4}",
        )

    def _sender(self, i: int, rng: random.Random) -> Worker:
        to = [f"w{rng.randrange(self.workers):03d}" for _ in range(rng.randint(0, 3))] + ["gone"]
        flows = tuple(Transfers(w, rng.randrange(3), rng.randint(1, 4)) for w in to)
        return worker(f"p{i}", Role.PREFILL, transfers=flows, node="m" if self.alike else f"n{i}")

    def _entry(self, i: int, rng: random.Random) -> PoolEntry:
        plain = 20 if self.alike else rng.randint(0, self.sizes)
        some = entry(
            f"r{i}",
            plain,
            kv_bytes=MB if self.alike else rng.choice([0, MB, rng.randint(0, 40 * MB)]),
            sender="p0" if self.alike else rng.choice(["p0", "p1", "p2", "lost"]),
            entered_s=50.0 if self.alike else rng.choice([20.0, 60.0, rng.uniform(0.0, 100.0)]),
            slots=rng.randint(1, self.sequences),
            priority=rng.randrange(self.priorities),
            ttft_slo_s=None if self.alike else rng.choice([None, 0.5, 60.0, rng.uniform(1.0, 200.0)]),
            predicted_tokens=None
            if self.forecasts == "none" or rng.random() < 0.2
            else rng.choice([50.0, rng.uniform(1.0, 400.0)]),
        )
        return dataclasses.replace(some, lease_until_s=some.entered_s + rng.choice([30.0, 90.0, 1000.0]))

    def _hits(self, some: PoolEntry, workers: Sequence[Worker], rng: random.Random) -> dict[str, int]:
        held = rng.sample(workers, rng.randint(0, min(3, len(workers))))
        return {w.id: rng.randint(0, some.request.prompt_tokens) for w in held} | {"elsewhere": 5}

    def _oracle(self, rng: random.Random) -> Oracle | None:
        if self.network == "none":
            return None
        learned = self.network != "tiers"
        pairs = {
            (f"p{rng.randrange(3)}", f"w{i:03d}"): PairEstimate(
                rng.uniform(1.0, 90.0) * MB, rng.choice([0.0, 99.0]), rng.choice([None, 0.003])
            )
            for i in range(self.workers if learned else 0)
        }
        if self.network == "pairs":  # of all or of all but one, and no tiers
            each = {(f"p{p}", f"w{i:03d}"): pair for p in range(3) for i, pair in enumerate(pairs.values())}
            return Oracle(pairs={k: dataclasses.replace(p, at_s=99.0) for k, p in each.items()})
        places = {f"n{i}": NodePlace(rack=f"r{i // 2}", pod=rng.choice(["", "p"])) for i in range(4)}
        return Oracle(
            {0: 400.0 * MB, 1: 100.0 * MB, 3: 25.0 * MB},
            {1: 0.001, 3: 0.002},
            {("p0", "w000"): 1} if rng.random() < 0.3 else {},
            places,
            {1: 0.3},
            rng.choice([None, 0.0, 99.0]),
            pairs,
            own_flows_excluded=rng.random() < 0.8,
            uplinks={1: 4} if rng.random() < 0.3 else {},
        )


FLEETS = st.builds(
    Fleet,
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 9),
    pool=st.integers(1, 40),
    barriers=st.integers(1, 3),
    sequences=st.integers(1, 3),
    priorities=st.integers(1, 3),
    lists=st.integers(1, 4),
    sizes=st.sampled_from([3, 60, 400]),
    network=st.sampled_from(["none", "tiers", "both", "pairs"]),
    forecasts=st.sampled_from(["some", "none", "no usual"]),
    alike=st.booleans(),
)
POLICIES = st.builds(
    Composition,
    horizon=st.sampled_from([0, 1, 7, 48]),
    gamma=st.sampled_from([0.5, 0.9, 1.0]),
    seconds_per_kv_token=st.sampled_from([0.0, 1e-7, 1e-4, 1e-2]),
    stream_weight=st.sampled_from([0.01, 1.0]),
    scarcity=st.sampled_from([0.0, 8.0]),
    max_inflight=st.sampled_from([0, 2, 16]),
    strict_priorities=st.booleans(),
    cost_weight=st.sampled_from([0.0, 0.0, 1.0, 1, 0.7]),
    credit=st.sampled_from(["wait", "tokens"]),
    rent_weight=st.sampled_from([0.0, 1.0, 50.0]),
    near_scarcity=st.sampled_from([0.0, 3.0, 2.5]),
    ageing=st.sampled_from([0.0, 1.0, 0.3]),
    window=st.integers(1, 9),
    abundance=st.sampled_from([0.0, 1.0, 99.0]),
    max_wait_s=st.sampled_from([0.0, 60.0, 1000.0]),
    reserve_tokens=st.sampled_from([0, 3]),
)


def both(
    policy: Composition, feasible: Feasible, view: Snapshot
) -> tuple[tuple[Assignment, ...], tuple[Assignment, ...]]:
    """The compiled rounds' and the plain ones', from equal generators, which they must use alike."""
    rngs = random.Random(5), random.Random(5)
    made = policy.assign(feasible, view, rngs[0])
    expected: tuple[Assignment, ...] = ()
    for group, entries in sorted(split_by_group(feasible).items()):
        expected += policy.round(group, entries, view, rngs[1]).run()
    assert rngs[0].getstate() == rngs[1].getstate()
    return made, expected


@settings(max_examples=600, deadline=None)
@given(FLEETS, POLICIES)
def test_it_decides_as_the_plain_round(fleet: Fleet, policy: Composition) -> None:
    view, feasible = fleet.build()
    made, expected = both(policy, feasible, view)
    assert made == expected
    assert repr(made) == repr(expected)  # types and signs of zero too: it is what a journal would hold


@pytest.mark.parametrize("window", [10, 12])
def test_wide_windows_are_the_same(window: int) -> None:
    sets = 0
    for seed in range(6):
        view, feasible = Fleet(seed, workers=6, pool=30, sizes=400).build()
        policy = Composition(window=window, abundance=99.0, seconds_per_kv_token=1e-3, max_wait_s=1000.0)
        made, expected = both(policy, feasible, view)
        assert repr(made) == repr(expected)
        sets += sum(a.decision.reason is Reason.BEST_SUBSET for a in made)
    assert sets > 5


def test_two_groups_are_decided_one_after_the_other() -> None:
    view, feasible = Fleet(4, workers=8, pool=30).build()
    groups = {w.id: "gh"[i % 2] for i, w in enumerate(view.workers.values())}
    workers = {w.id: dataclasses.replace(w, group=groups[w.id]) for w in view.workers.values()}
    pool = [dataclasses.replace(e, group="gh"[i % 2]) for i, (e, _) in enumerate(feasible)]
    view = dataclasses.replace(view, workers=workers, pool=tuple(pool))
    split = {g: [w for w in workers.values() if w.role is Role.DECODE and w.group == g] for g in "gh"}
    made, expected = both(Composition(), [(e, split[e.group]) for e in pool], view)
    assert repr(made) == repr(expected)
    assert {groups[a.decision.worker] for a in made} == {"g", "h"}


def test_the_random_cases_reach_every_reason_sets_of_several_and_overflow() -> None:
    reasons: set[Reason] = set()
    largest = overflows = rents = 0
    for seed in range(40):
        fleet = Fleet(seed, workers=6, pool=30, barriers=1 + seed % 2, sizes=[60, 400][seed % 2])
        view, feasible = fleet.build()
        policy = Composition(
            abundance=[0.0, 1.0, 99.0][seed % 3], seconds_per_kv_token=[1e-7, 1e-2][seed % 2]
        )
        made, expected = both(policy, feasible, view)
        assert repr(made) == repr(expected)
        terms = [a.decision.ranking[0].terms for a in made]
        reasons |= {a.decision.reason for a in made}
        largest = max(largest, *(int(t["set_size"]) for t in terms))
        overflows += sum(t["slowdown_s"] > 0 for t in terms)
        rents += sum(t["near_rent_s"] > 0 for t in terms)
    assert reasons == {Reason.FILL, Reason.BEST_SUBSET, Reason.LEAST_HARM, Reason.OVERDUE}
    assert largest >= 3
    assert min(overflows, rents) >= 20


@pytest.mark.parametrize(("workers", "pool", "busy"), [(64, 256, True), (144, 300, True), (32, 400, False)])
@pytest.mark.parametrize("forecast", [False, True])
def test_large_ticks_are_the_same(workers: int, pool: int, busy: bool, forecast: bool) -> None:
    for seed in range(2):
        case = tick_case(workers, pool, random.Random(seed), busy)
        view, feasible = case.snapshot, case.feasible
        if forecast:
            view = dataclasses.replace(view, typical=TypicalEntry(3e8, 200.0))
            rng = random.Random(seed)
            feasible = [
                (
                    dataclasses.replace(
                        e, request=dataclasses.replace(e.request, predicted_tokens=rng.expovariate(0.005))
                    ),
                    to,
                )
                for e, to in feasible
            ]
        made, expected = both(Composition(), feasible, view)
        assert repr(made) == repr(expected)
        assert len(made) > 50
