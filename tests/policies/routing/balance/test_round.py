"""A round of BR-0 or BR-H, every admission checked against brute force over all workers, entries and subsets."""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.routing.balance.round import balance
from policies.routing.balance.stages import Aim, StageLimits
from policies.routing.base import Assignment, Reason
from policies.state.views import Departure, PoolEntry, Snapshot, Worker
from tests.policies.routing.views import entry, snapshot, worker

RESERVE = 3
# scores closer than this may be ordered either way
NEAR = 1e-6


@dataclass(frozen=True)
class Fleet:
    """A random group and pool, by a seed: loads, barriers, forecasts; sizes with many equal ones, ages, priorities."""

    seed: int
    workers: int
    pool: int
    barriers: int = 1
    sequences: int = 1
    priorities: int = 1
    # how many different lists of workers entries may go to
    lists: int = 1
    sizes: int = 60  # largest prompt
    leases_s: tuple[float, ...] = (1e6,)
    by_slo: bool = False

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
                lease_s=rng.choice(self.leases_s),
                slots=rng.randint(1, self.sequences),
                priority=rng.randrange(self.priorities),
                ttft_slo_s=rng.choice([None, rng.uniform(50.0, 200.0)]),
            )
            for i in range(self.pool)
        ]
        view = dataclasses.replace(snapshot(workers, entries, now_s=100.0), overdue_by_slo=self.by_slo)
        return view, [(e, rng.choice(lists)) for e in entries], workers

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
    workers=st.integers(1, 6),
    pool=st.integers(1, 25),
    barriers=st.integers(1, 3),
    sequences=st.integers(1, 3),
    priorities=st.integers(1, 3),
    lists=st.integers(1, 4),
    sizes=st.sampled_from([3, 60, 400]),
    leases_s=st.sampled_from([(1e6,), (1e6, 120.0)]),
    by_slo=st.booleans(),
)
LIMITS = st.builds(
    StageLimits,
    window=st.integers(1, 6),
    abundance=st.sampled_from([0.0, 1.0, 4.0, 99.0]),
    reserve_tokens=st.sampled_from([0, RESERVE]),
    ageing_s=st.sampled_from([None, 5.0, 300.0]),
    pool_wide=st.booleans(),
    max_wait_s=st.sampled_from([None, 0.0, 10.0, 99.0]),
)
AIMS = st.builds(
    Aim,
    horizon=st.sampled_from([0, 1, 7, 12]),
    gamma=st.sampled_from([0.5, 0.9, 1.0]),
    alpha=st.sampled_from([0.3, 1.0]),
    beta=st.sampled_from([None, 0.0, 2.5]),
    slack_tokens=st.sampled_from([0.0, 4.7]),
)


class Checker:
    """A round followed step by step: what every choice had to choose from, and how good each would have been."""

    def __init__(
        self,
        feasible: Sequence[tuple[PoolEntry, Sequence[Worker]]],
        workers: Sequence[Worker],
        aim: Aim,
        limits: StageLimits,
        now_s: float,
        by_slo: bool = False,
    ) -> None:
        self.aim, self.limits, self.now_s, self.by_slo = aim, limits, now_s, by_slo
        self.workers = {w.id: w for w in workers}
        self.left = {e.request.attempt_id: e for e, _ in feasible}
        self.allowed = {e.request.attempt_id: {w.id for w in to} for e, to in feasible}
        self.mean = sum(e.request.prompt_tokens for e in self.left.values()) / len(self.left)
        self.free = {w.id: w.free_slots for w in workers}
        self.room = {w.id: w.free_kv_tokens if w.slots_used else w.kv_capacity_tokens for w in workers}
        self.admitted: dict[str, list[PoolEntry]] = {w.id: [] for w in workers}

    def slots(self, e: PoolEntry, w: str) -> int:
        return e.request.slots if e.request.slots == 1 else min(e.request.slots, self.workers[w].slots)

    def room_for(self, entries: Sequence[PoolEntry], w: str) -> bool:
        need = sum(e.request.prompt_tokens + self.limits.reserve_tokens * self.slots(e, w) for e in entries)
        return need <= self.room[w]

    def fits(self, e: PoolEntry, w: str) -> bool:
        if w not in self.allowed[e.request.attempt_id] or self.slots(e, w) > self.free[w]:
            return False
        return not self.admitted[w] or self.room_for([e], w)

    def load(self, w: str, h: int) -> int:
        """DESIGN 3.5: what runs grows by a token a sequence a step until it is forecast to leave."""
        one, gone = self.workers[w], [d for d in self.workers[w].departures if d.step <= h]
        stay = one.slots_used - sum(d.sequences for d in gone)
        now = one.kv_tokens - sum(d.kv_tokens for d in gone) + stay * h
        return now + sum(e.request.prompt_tokens + self.slots(e, w) * h for e in self.admitted[w])

    def margins(self, w: str) -> list[int]:
        mates = [o for o in self.workers if self.workers[o].barrier == self.workers[w].barrier]
        steps = range(self.aim.horizon + 1)
        return [max(self.load(o, h) for o in mates) - self.load(w, h) for h in steps]

    def score(self, entries: Sequence[PoolEntry], w: str) -> float:
        """F_H, word by word."""
        total = sum(e.request.prompt_tokens for e in entries)
        size = sum(o.barrier == self.workers[w].barrier for o in self.workers.values())
        beta = size if self.aim.beta is None else self.aim.beta
        return sum(
            self.aim.gamma**h
            * (self.aim.alpha * total - beta * max(0.0, total - (m - self.aim.slack_tokens)))
            for h, m in enumerate(self.margins(w))
        )

    def age(self, e: PoolEntry) -> float:
        if self.limits.ageing_s is None:
            return 0.0
        return self.mean * self.aim.gain / self.limits.ageing_s * max(0.0, self.now_s - e.entered_s)

    def worth(self, entries: Sequence[PoolEntry], w: str) -> float:
        """F_H and the age bonus of the oldest."""
        return self.score(entries, w) + max(self.age(e) for e in entries)

    def is_overdue(self, e: PoolEntry) -> bool:
        """Returns whether an entry goes before all others, because two thirds of its lease have passed."""
        return self.now_s > e.entered_s + (e.lease_until_s - e.entered_s) * (2.0 / 3.0)

    def is_pressing(self, e: PoolEntry) -> bool:
        """Returns whether an entry goes before the others of its class, by its wait or by its objective."""
        most_s = self.limits.max_wait_s
        old = most_s is not None and e.entered_s < self.now_s - most_s
        slo_s = e.request.terms.ttft_slo_s
        return old or (self.by_slo and slo_s is not None and slo_s * (2.0 / 3.0) < self.now_s <= slo_s)

    def first(self) -> list[PoolEntry]:
        """The entries that have to go first, in their order."""
        placeable = [e for e in self.left.values() if any(self.fits(e, o) for o in self.workers)]
        overdue = [e for e in placeable if self.is_overdue(e)]
        priority = min(e.request.terms.priority for e in placeable)
        return overdue or [
            e for e in placeable if e.request.terms.priority == priority and self.is_pressing(e)
        ]

    def check(self, w: str, chosen: list[PoolEntry], reason: Reason, terms: dict[str, float]) -> None:
        """One admission, and books it."""
        margin = min(self.margins(w))
        assert terms["score"] == pytest.approx(self.score(chosen, w), rel=1e-9, abs=NEAR)
        assert (terms["margin_tokens"], terms["free_slots"]) == (margin, self.free[w])
        first = self.first()
        if reason is Reason.OVERDUE:
            assert chosen == first[:1]
            assert margin == max(min(self.margins(o)) for o in self.workers if self.fits(chosen[0], o))
        else:
            assert not first
            self.check_stage(w, chosen, reason, terms["score"])
        for e in chosen:
            assert self.fits(e, w)
            del self.left[e.request.attempt_id]
        self.admitted[w] += chosen
        self.free[w] -= sum(self.slots(e, w) for e in chosen)
        self.room[w] -= sum(
            e.request.prompt_tokens + self.limits.reserve_tokens * self.slots(e, w) for e in chosen
        )

    def check_stage(self, w: str, chosen: list[PoolEntry], reason: Reason, score: float) -> None:
        priority = min(
            e.request.terms.priority for e in self.left.values() if any(self.fits(e, o) for o in self.workers)
        )
        same = [e for e in self.left.values() if e.request.terms.priority == priority]
        assert {e.request.terms.priority for e in chosen} == {priority}
        usable = [o for o in self.workers if self.free[o] and any(self.fits(e, o) for e in same)]
        assert (self.free[w], min(self.margins(w))) == max(
            (self.free[o], min(self.margins(o))) for o in usable
        )
        fitting = sorted((e for e in same if self.fits(e, w)), key=lambda e: -e.request.prompt_tokens)
        worths = {e.request.attempt_id: self.worth([e], w) for e in fitting}
        if sum(self.free.values()) >= self.limits.abundance * len(self.workers):
            self.is_single(chosen, worths)
            assert reason is Reason.FILL
            return
        # of equal ones the first in the order of service
        heads = sorted(fitting, key=lambda e: -(e.request.prompt_tokens + self.age(e) / self.aim.gain))
        window = heads[: self.limits.window]
        candidates = fitting if self.limits.pool_wide else window
        singles = {e.request.attempt_id: worths[e.request.attempt_id] for e in candidates}
        best_set = self.best_set(window, w) if self.free[w] > 1 else -float("inf")
        rival = max(0.0, *singles.values()) if self.limits.pool_wide else 0.0
        if best_set > rival + NEAR:
            assert self.worth(chosen, w) == pytest.approx(best_set, rel=1e-9, abs=NEAR)
            assert set(chosen) <= set(window)
            assert reason is Reason.BEST_SUBSET
        elif best_set < rival - NEAR:
            self.is_single(chosen, singles)
            assert reason is (Reason.BEST_SUBSET if score > 0 else Reason.LEAST_HARM)

    def is_single(self, chosen: list[PoolEntry], worths: dict[str, float]) -> None:
        """One entry was chosen, and none would have been better."""
        (one,) = chosen
        assert worths[one.request.attempt_id] == pytest.approx(max(worths.values()), rel=1e-9, abs=NEAR)

    def best_set(self, window: list[PoolEntry], w: str) -> float:
        """The worth of the best of all subsets of the window that the worker can take."""
        return max(
            (
                self.worth(some, w)
                for n in range(1, len(window) + 1)
                for some in itertools.combinations(window, n)
                if sum(self.slots(e, w) for e in some) <= self.free[w] and self.room_for(some, w)
            ),
            default=-float("inf"),
        )


def check(
    fleet: Fleet, aim: Aim, limits: StageLimits
) -> tuple[tuple[Assignment, ...], list[tuple[Reason, int]]]:
    """A round, checked; its admissions, and reason and size of each set."""
    view, feasible, workers = fleet.build()
    made = balance(feasible, view, workers, aim, limits, random.Random(5))
    checker, kinds = Checker(feasible, workers, aim, limits, view.now_s, view.overdue_by_slo), []
    for decision, group in itertools.groupby(made, key=lambda a: id(a.decision)):
        some = list(group)
        shown = some[0].decision
        assert decision == id(shown)
        chosen = [checker.left[a.attempt_id] for a in some]
        assert shown.ranking[0].worker == shown.worker
        checker.check(shown.worker, chosen, shown.reason, dict(shown.ranking[0].terms))
        kinds.append((shown.reason, len(some)))
    left = [e for e in checker.left.values() if any(checker.fits(e, w) for w in checker.workers)]
    # whoever stays in the pool fits nowhere any more
    assert not left
    return made, kinds


@settings(max_examples=120, deadline=None)
@given(FLEETS, LIMITS, AIMS)
def test_every_admission_is_the_best_there_was(fleet: Fleet, limits: StageLimits, aim: Aim) -> None:
    check(fleet, aim, limits)


@settings(max_examples=60, deadline=None)
@given(FLEETS, LIMITS)
def test_br_0_admits_the_best_there_was(fleet: Fleet, limits: StageLimits) -> None:
    check(fleet, Aim(), limits)


def test_the_random_cases_reach_every_reason_and_sets_of_several() -> None:
    kinds = [
        kind
        for seed in range(20)
        for kind in check(
            Fleet(seed, workers=6, pool=25, barriers=1 + seed % 2, leases_s=(1e6, 1e6, 120.0)),
            Aim(7, 0.9),
            StageLimits(6, [0.0, 2.0, 99.0][seed % 3], RESERVE),
        )[1]
    ]
    assert {reason for reason, _ in kinds} == {
        Reason.FILL,
        Reason.BEST_SUBSET,
        Reason.LEAST_HARM,
        Reason.OVERDUE,
    }
    assert max(size for _, size in kinds) >= 3


@pytest.mark.parametrize("window", [10, 12])
def test_the_widest_windows_are_searched_whole(window: int) -> None:
    fleet = Fleet(3, workers=2, pool=14)
    _, kinds = check(fleet, Aim(), StageLimits(window, 99.0, RESERVE))
    assert any(reason is Reason.BEST_SUBSET and size > 1 for reason, size in kinds)
