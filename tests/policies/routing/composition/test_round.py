"""A round of the composition, every admission checked against its formula, written out for one pair at a time."""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.network.oracle import NodePlace, Oracle, PairEstimate, Path
from policies.routing.base import Assignment, Feasible, Reason
from policies.routing.composition.composition import Composition
from policies.state.views import (
    Departure,
    KnownHits,
    PoolEntry,
    Role,
    Snapshot,
    Transfers,
    TypicalEntry,
    Worker,
)
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
    # how many different lists of workers entries may go to
    lists: int = 1
    sizes: int = 60  # largest prompt
    network: str = "tiers"
    forecasts: str = "some"
    leases_s: tuple[float, ...] = (30.0, 90.0, 1000.0)
    # all workers and entries are, so that draws decide
    alike: bool = False
    overcommit: int = 0
    by_slo: bool = False

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
        in_use = {
            e.request.attempt_id: {
                w: rng.randint(0, tokens)
                for w, tokens in hits.get(e.request.attempt_id, {}).items()
                if rng.random() < 0.7
            }
            for e in pool
        }
        view = dataclasses.replace(
            view,
            typical=usual,
            hits=KnownHits(hits, in_use),
            overcommit_slots=self.overcommit,
            overdue_by_slo=self.by_slo,
            usual_output_tokens=rng.choice([None, 44.0]),
        )
        return view, [(e, rng.choice(lists)) for e in pool]

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
        return dataclasses.replace(some, lease_until_s=some.entered_s + rng.choice(self.leases_s))

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
    workers=st.integers(1, 7),
    pool=st.integers(1, 25),
    barriers=st.integers(1, 3),
    sequences=st.integers(1, 3),
    priorities=st.integers(1, 3),
    lists=st.integers(1, 4),
    sizes=st.sampled_from([3, 60, 400]),
    network=st.sampled_from(["none", "tiers", "both", "pairs"]),
    forecasts=st.sampled_from(["some", "none", "no usual"]),
    alike=st.booleans(),
    overcommit=st.integers(0, 3),
    by_slo=st.booleans(),
)
POLICIES = st.builds(
    Composition,
    horizon=st.sampled_from([0, 1, 7, 12]),
    gamma=st.sampled_from([0.5, 0.9, 1.0]),
    seconds_per_kv_token=st.sampled_from([0.0, 1e-7, 1e-4, 1e-2]),
    stream_weight=st.sampled_from([0.01, 1.0]),
    scarcity=st.sampled_from([0.0, 8.0]),
    max_inflight=st.sampled_from([0, 2, 16]),
    cost_weight=st.sampled_from([0.0, 0.0, 1.0, 1, 0.7]),
    credit=st.sampled_from(["wait", "tokens"]),
    rent_weight=st.sampled_from([0.0, 1.0, 50.0]),
    near_scarcity=st.sampled_from([0.0, 3.0, 2.5]),
    ageing_s=st.sampled_from([None, 1.0, 3.0]),
    window=st.integers(1, 6),
    abundance=st.sampled_from([0.0, 1.0, 99.0]),
    max_wait_s=st.sampled_from([None, 0.0, 60.0, 1000.0]),
    reserve_tokens=st.sampled_from([0, 3]),
)


class Checker:
    """A round followed step by step, in the formulas of `composition`, without strict priorities."""

    def __init__(self, policy: Composition, feasible: Feasible, view: Snapshot) -> None:
        self.policy, self.view = policy, view
        self.workers = {w.id: w for w in view.workers.values() if w.role is Role.DECODE}
        self.left = {e.request.attempt_id: e for e, _ in feasible}
        self.allowed = {e.request.attempt_id: {w.id for w in to} for e, to in feasible}
        # below 0 once an entry queues there
        self.free = {w.id: w.free_slots for w in self.workers.values()}
        self.extra = {
            w.id: max(0, w.slots + view.overcommit_slots - w.slots_used) - w.free_slots
            for w in self.workers.values()
        }
        self.room = {
            w.id: w.free_kv_tokens if w.slots_used else w.kv_capacity_tokens for w in self.workers.values()
        }
        self.admitted: dict[str, list[PoolEntry]] = {w: [] for w in self.workers}
        self.credits: dict[str, float] = {}
        self.dearest: dict[tuple[object, ...], tuple[float, float]] = {}
        self.uncounted: set[str] = set()
        self.queued = max(0, len(view.pool) - sum(self.free.values()))
        self.senders = [w for w in view.workers.values() if w.role is Role.PREFILL]
        self.tiers = [
            tier
            for sender in self.senders
            for to, _, flows in sender.transfers
            if to in view.workers
            for tier in [self.tier(sender.id, to)] * flows
        ]

    # ---------------------------------------------------------------------------------------------- room and loads

    def tokens(self, e: PoolEntry) -> int:
        return max(1, e.request.prompt_tokens)

    def slots(self, e: PoolEntry, w: str) -> int:
        return min(e.request.slots, self.workers[w].slots)

    def need(self, e: PoolEntry, w: str) -> int:
        return self.tokens(e) + self.policy.reserve_tokens * self.slots(e, w)

    def in_use(self, e: PoolEntry, w: str) -> int:
        return self.view.hits.tokens_in_use(e.request).get(w, 0)

    def takes(self, entries: Sequence[PoolEntry], w: str) -> bool:
        slots = sum(self.slots(e, w) for e in entries)
        need = sum(self.need(e, w) - self.in_use(e, w) for e in entries)
        return slots <= self.free[w] and need <= self.room[w]

    def fits(self, e: PoolEntry, w: str, extra: int = 0) -> bool:
        if w not in self.allowed[e.request.attempt_id] or self.slots(e, w) > self.free[w] + extra:
            return False
        return not self.admitted[w] or self.need(e, w) <= self.room[w]

    def load(self, w: str, h: int) -> int:
        one, gone = self.workers[w], [d for d in self.workers[w].departures if d.step <= h]
        stay = one.slots_used - sum(d.sequences for d in gone)
        now = one.kv_tokens - sum(d.kv_tokens for d in gone) + stay * h
        return now + sum(self.tokens(e) + self.slots(e, w) * h for e in self.admitted[w])

    def margins(self, w: str) -> list[int]:
        mates = [o for o in self.workers if self.workers[o].barrier == self.workers[w].barrier]
        return [max(self.load(o, h) for o in mates) - self.load(w, h) for h in range(self.policy.horizon + 1)]

    # --------------------------------------------------------------------------------------------------- the terms

    def tier(self, sender: str, w: str) -> int | None:
        source, oracle = self.view.workers.get(sender), self.view.oracle
        if oracle is None or source is None:
            return None
        return oracle.tier(sender, source.node, w, self.view.workers[w].node)

    def path(self, sender: str, w: str) -> Path | None:
        """The path of a pair; None for all of a sender's where one is missing."""
        source, oracle = self.view.workers.get(sender), self.view.oracle
        if oracle is None:
            return None
        node = source.node if source else ""
        found = {o: oracle.path(sender, node, o, self.workers[o].node, NOW_S) for o in self.workers}
        return found[w] if all(found.values()) else None

    def transfer_s(self, e: PoolEntry, w: str, hit_tokens: int) -> float:
        path, oracle = self.path(e.prefill_worker, w), self.view.oracle
        if path is None or oracle is None:
            return 0.0
        far = sum(tier is not None and tier >= path.tier for tier in self.tiers)
        n = min(self.policy.max_inflight, far / len(self.senders)) if oracle.own_flows_excluded else 0.0
        n_bytes = e.kv_bytes * (1.0 - min(1.0, hit_tokens / self.tokens(e)))
        return (
            n_bytes * (1 + n / oracle.uplinks.get(path.tier, 1)) / path.residual_bytes_per_s + path.latency_s
        )

    def step_s(self, sequences: int) -> float:
        return self.policy.step_base_s + self.policy.step_per_seq_s * sequences

    def queue_and_step_s(self, w: str) -> float:
        one = self.workers[w]
        running = max(one.slots_used, (one.engine_running or 0) + (one.engine_waiting or 0))
        if one.engine_running is None:
            running = one.slots_used
        total = running + sum(self.slots(e, w) for e in self.admitted[w])
        queued: float = max(0, total - one.slots)
        batch = min(total, one.slots)
        # a slot frees every output / slots steps
        forecast = self.view.typical.output_tokens if self.view.typical else None
        usual = forecast or self.view.usual_output_tokens
        if usual:
            queued = max(0, total - one.slots + 1) * usual / one.slots
        if queued and one.engine_running is not None and one.engine_waiting:
            batch = min(one.engine_running, one.slots)
        return queued * self.step_s(batch) + self.step_s(batch + 1)

    def cost_s(self, e: PoolEntry, w: str) -> float:
        hit_tokens = self.view.hits.tokens(e.request).get(w, 0)
        return self.transfer_s(e, w, hit_tokens) + self.queue_and_step_s(w)

    def slack(self, e: PoolEntry) -> float:
        slo_s = e.request.terms.ttft_slo_s
        if not slo_s:
            return 1.0
        slack_s = e.request.arrived_s + slo_s - NOW_S
        most = self.policy.max_weight
        return most if slack_s * most <= slo_s else max(1.0, slo_s / slack_s)

    def credit(self, e: PoolEntry) -> float:
        """credit_r, fixed when the entry is first weighed. Entries alike share the bound that the first of them had,
        which takes the worst of each term apart.
        """
        if self.policy.credit == "tokens":
            return self.policy.credit_s_per_token * self.tokens(e)
        if e.request.attempt_id not in self.credits:
            to = [w for w in self.workers if w in self.allowed[e.request.attempt_id]]
            alike = e.prefill_worker, e.request.terms.priority, tuple(to)
            if alike not in self.dearest:
                nothing, much = dataclasses.replace(e, kv_bytes=0), dataclasses.replace(e, kv_bytes=1000 * MB)
                fixed_s = max(self.transfer_s(nothing, w, 0) for w in to)
                much_s = max(self.transfer_s(much, w, 0) - self.transfer_s(nothing, w, 0) for w in to)
                self.dearest[alike] = fixed_s + max(map(self.queue_and_step_s, to)), much_s / 1000 / MB
            least_s, per_byte_s = self.dearest[alike]
            dearest_s = least_s + e.kv_bytes * per_byte_s
            self.credits[e.request.attempt_id] = self.slack(e) * (
                self.policy.wait_s + self.policy.cost_weight * dearest_s
            )
        return self.credits[e.request.attempt_id]

    def hold(self, e: PoolEntry) -> float:
        usual, forecast = self.view.typical, e.request.predicted_tokens
        if usual is None or not usual.output_tokens or forecast is None:
            return float(e.request.slots)
        return e.request.slots * forecast / usual.output_tokens

    def queue_rent_s(self) -> float:
        output = (self.view.typical.output_tokens or 0.0) if self.view.typical else 0.0
        step_s = max(
            self.step_s(w.slots_used) + self.policy.seconds_per_kv_token * w.kv_tokens
            for w in self.workers.values()
        )
        slots = sum(w.slots for w in self.workers.values())
        return self.policy.rent_weight * self.queued * output * step_s / slots

    def near_s(self, sender: str, w: str) -> float:
        """near_g: over the workers by distance, from g's place on."""
        usual = self.view.typical
        if usual is None or not usual.kv_bytes or self.path(sender, w) is None:
            return 0.0
        seconds = {}
        for o in self.workers:
            path = self.path(sender, o)
            assert path is not None
            seconds[o] = usual.kv_bytes / path.residual_bytes_per_s + path.latency_s
        order = sorted(self.workers, key=lambda o: (seconds[o], o))
        found = 0.0
        for at, (near, far) in enumerate(itertools.pairwise(order)):
            if at >= order.index(w):
                some = [self.workers[o] for o in order[: at + 1]]
                occupied = sum(min(o.slots_used, o.slots) for o in some) / sum(o.slots for o in some)
                found += occupied**self.policy.near_scarcity * (seconds[far] - seconds[near])
        return found

    def age_s(self, e: PoolEntry) -> float:
        if self.policy.ageing_s is None:
            return 0.0
        return max(0.0, NOW_S - e.entered_s) / self.policy.ageing_s

    def slowdown(self, w: str) -> float:
        """N s D / sum_h gamma^h."""
        policy, one, every = self.policy, self.workers[w], self.workers.values()
        occupied = min(1.0, sum(o.slots_used for o in every) / sum(o.slots for o in every))
        u = policy.stream_weight
        mates = [o for o in every if o.barrier == one.barrier] if one.barrier else [one]
        n = (u + (1 - u) * occupied**policy.scarcity) * max(1, sum(o.slots_used for o in mates))
        n += self.queued * len(mates) / len(self.workers)
        held = policy.hold_steps / sum(policy.gamma**h for h in range(policy.horizon + 1))
        return n * policy.seconds_per_kv_token * held

    def value(self, entries: Sequence[PoolEntry], w: str) -> float:
        """value(S, g)."""
        total = sum(map(self.tokens, entries))
        over = sum(self.policy.gamma**h * max(0, total - m) for h, m in enumerate(self.margins(w)))
        found = -self.slowdown(w) * over
        for e in entries:
            rent_s = self.hold(e) * (self.queue_rent_s() + self.near_s(e.prefill_worker, w))
            weight = self.policy.cost_weight * self.slack(e)
            found += self.credit(e) + self.age_s(e) - weight * self.cost_s(e, w) - rent_s
        return found

    # -------------------------------------------------------------------------------------------------- the choices

    def is_overdue(self, e: PoolEntry) -> bool:
        """Returns whether an entry goes before all others: two thirds of its lease, never renewed, have passed."""
        return e.entered_s < NOW_S - (e.lease_until_s - e.entered_s) * 2 / 3

    def is_pressing(self, e: PoolEntry) -> bool:
        """Returns whether an entry goes before the others of its class: it has waited for longer than `max_wait_s`, or
        is about to miss its objective.
        """
        most_s, slo_s = self.policy.max_wait_s, e.request.terms.ttft_slo_s
        old = most_s is not None and e.entered_s < NOW_S - most_s
        return old or (self.view.overdue_by_slo and slo_s is not None and slo_s * 2 / 3 < NOW_S <= slo_s)

    def check(self, w: str, chosen: list[PoolEntry], reason: Reason, score: float) -> None:
        """One admission, and books it."""
        policy, near = self.policy, {"rel": 1e-9, "abs": 1e-7}
        overdue = [e for e in self.left.values() if self.is_overdue(e) and self.fits_any(e)]
        rest = sorted(
            (e for e in self.left.values() if self.fits_any(e)), key=lambda e: e.request.terms.priority
        )
        same = [e for e in self.left.values() if e.request.terms.priority == rest[0].request.terms.priority]
        first = overdue or [e for e in same if self.is_pressing(e) and self.fits_any(e)]
        if first:
            assert (reason, chosen) == (Reason.OVERDUE, first[:1])
            assert score == pytest.approx(self.best_worker(chosen[0]), **near)
        elif self.abundant(same):
            largest = max(filter(self.fits_any, same), key=self.tokens)
            assert (reason, chosen) == (Reason.FILL, [largest])
            assert score == pytest.approx(self.best_worker(largest), **near)
        else:
            usable = [o for o in self.workers if self.free[o] > 0 and any(self.fits(e, o) for e in same)]
            place = self.free[w], min(self.margins(w))
            assert place == max((self.free[o], min(self.margins(o))) for o in usable)
            turn = {e.request.attempt_id: self.hold(e) * self.queue_rent_s() - self.age_s(e) for e in same}
            fitting = [e for e in same if self.fits(e, w)]
            fitting.sort(key=lambda e: -self.tokens(e))
            fitting.sort(key=lambda e: (turn[e.request.attempt_id], e.entered_s))
            window = fitting[: policy.window]
            for e in window:
                self.credit(e)
            sets = [some for n in range(1, len(window) + 1) for some in itertools.combinations(window, n)]
            best = max((self.value(some, w) for some in sets if self.takes(some, w)), default=-1.0)
            if abs(best) > 1e-7:
                assert reason is (Reason.BEST_SUBSET if best > 0 else Reason.LEAST_HARM)
            if reason is Reason.LEAST_HARM:
                best = max(self.value([e], w) for e in window)
            assert score == pytest.approx(best, **near)
            assert {e.request.attempt_id for e in chosen} <= {e.request.attempt_id for e in window}
        assert score == pytest.approx(self.value(chosen, w), **near)
        for e in chosen:
            assert self.fits(e, w, 0 if len(chosen) > 1 else self.extra[w])
            del self.left[e.request.attempt_id]
            self.tiers.append(self.tier(e.prefill_worker, w))
        self.free[w] -= sum(self.slots(e, w) for e in chosen)
        self.room[w] -= sum(self.need(e, w) - self.in_use(e, w) for e in chosen)
        self.admitted[w] += chosen

    def fits_any(self, e: PoolEntry) -> bool:
        return any(self.fits(e, w) for w in self.workers)

    def abundant(self, same: list[PoolEntry]) -> bool:
        """Larger entries that fit nowhere leave the count, one after the other, for the rest of the round."""
        left = [e for e in same if e.request.attempt_id not in self.uncounted]
        left.sort(key=lambda e: -self.tokens(e))
        while left and not sum(max(0, n) for n in self.free.values()) < self.policy.abundance * len(left):
            if self.fits_any(left[0]):
                return True
            self.uncounted.add(left.pop(0).request.attempt_id)
        return False

    def best_worker(self, e: PoolEntry) -> float:
        return max(self.value([e], w) for w in self.workers if self.fits(e, w, self.extra[w]))


def check(policy: Composition, fleet: Fleet) -> list[tuple[Assignment, int]]:
    """A round, checked; the first assignment of each set, and the set's size."""
    view, feasible = fleet.build()
    checker, sets = Checker(policy, feasible, view), []
    made = policy.assign(feasible, view, random.Random(5))
    for _, group in itertools.groupby(made, key=lambda a: id(a.decision)):
        some = list(group)
        shown = some[0].decision
        chosen = [checker.left[a.attempt_id] for a in some]
        checker.check(shown.worker, chosen, shown.reason, shown.ranking[0].terms["score"])
        sets.append((some[0], len(some)))
    assert not any(map(checker.fits_any, checker.left.values()))
    assert all(checker.free[w] + checker.extra[w] >= 0 for w in checker.free)
    return sets


@settings(max_examples=80, deadline=None)
@given(FLEETS, POLICIES)
def test_every_admission_is_the_best_there_was(fleet: Fleet, policy: Composition) -> None:
    check(policy, fleet)


def test_the_widest_window_is_valued_whole() -> None:
    sets = 0
    for seed in range(6):
        fleet = Fleet(seed, workers=3, pool=14, sizes=400, leases_s=(1e6,))
        policy = Composition(3, window=9, abundance=99.0, seconds_per_kv_token=1e-5, max_wait_s=1000.0)
        sets += sum(size > 1 for _, size in check(policy, fleet))
    assert sets > 1


def test_the_random_cases_reach_every_reason_sets_of_several_and_overflow() -> None:
    sets = [
        found
        for seed in range(16)
        for found in check(
            Composition(
                7,
                window=5,
                abundance=[0.0, 1.0, 99.0][seed % 3],
                seconds_per_kv_token=[1e-7, 1e-2][seed % 2],
            ),
            Fleet(seed, workers=5, pool=20, barriers=1 + seed % 2, sizes=[60, 400][seed % 2]),
        )
    ]
    terms = [a.decision.ranking[0].terms for a, _ in sets]
    reasons = {a.decision.reason for a, _ in sets}
    assert reasons == {Reason.FILL, Reason.BEST_SUBSET, Reason.LEAST_HARM, Reason.OVERDUE}
    assert max(size for _, size in sets) >= 3
    assert sum(t["slowdown_s"] > 0 for t in terms) >= 10
    assert sum(t["near_rent_s"] > 0 for t in terms) >= 10


def test_the_random_cases_reach_queues() -> None:
    queued = 0
    for seed in range(40):
        fleet = Fleet(seed, workers=6, pool=12, overcommit=1 + seed % 3, sizes=400)
        view, _ = fleet.build()
        taken = {w.id: w.slots_used for w in view.workers.values()}
        for first, size in check(Composition(3, window=4, abundance=0.0), fleet):
            name = first.decision.worker
            queued += taken[name] >= view.workers[name].slots
            taken[name] += size
    assert queued >= 10


def test_an_entry_that_queues_takes_no_free_slot() -> None:
    # the large entry queues near; the slot is still free for the entry left, so stage 1 goes on
    near, far = (
        worker("near", slots=2, slots_used=2, node="n0"),
        worker("far", slots=2, slots_used=1, node="n9"),
    )
    oracle = Oracle({0: 400.0 * MB, 3: 25.0 * MB})
    pool = [entry("large", 50, kv_bytes=400 * MB, entered_s=99.0), entry("small", 10, entered_s=99.0)]
    sender = worker("p", Role.PREFILL, node="n0")
    view = snapshot([sender, near, far], pool, oracle, now_s=NOW_S)
    feasible = [(e, [far, near]) for e in pool]
    policy = Composition(abundance=0.5)
    made = policy.assign(feasible, dataclasses.replace(view, overcommit_slots=1), random.Random(0))
    chosen = {a.attempt_id: (a.decision.worker, a.decision.reason) for a in made}
    assert chosen == {"large": ("near", Reason.FILL), "small": ("far", Reason.FILL)}
    made = policy.assign(feasible, view, random.Random(0))
    assert [(a.attempt_id, a.decision.worker) for a in made] == [("large", "far")]


@pytest.mark.parametrize(("in_use", "sent"), [(0, 1), (100, 3), (40, 1), (61, 2)])
def test_a_set_needs_kv_only_for_what_is_not_in_use_on_its_worker(in_use: int, sent: int) -> None:
    # 200 tokens are free; each of three prompts of 160 needs 160 - in_use
    one = worker("w", slots=8, slots_used=1, kv_tokens=800, kv_capacity_tokens=1000)
    pool = [entry(f"r{i}", 160, entered_s=99.0) for i in range(3)]
    hits = {e.request.attempt_id: {"w": in_use} for e in pool}
    view = dataclasses.replace(
        snapshot([worker("p", Role.PREFILL), one], pool, now_s=NOW_S), hits=KnownHits(hits, hits)
    )
    policy = Composition(abundance=99.0, reserve_tokens=0)
    feasible = [(e, [one]) for e in pool]
    checker = Checker(policy, feasible, view)
    made = policy.assign(feasible, view, random.Random(0))
    assert len(made) == sent
    shown = made[0].decision
    assert shown.ranking[0].terms["set_size"] == sent
    chosen = [checker.left[a.attempt_id] for a in made]
    checker.check("w", chosen, shown.reason, shown.ranking[0].terms["score"])


def test_without_a_free_slot_everything_waits_in_the_pool() -> None:
    full = [worker(f"w{i}", slots=2, slots_used=2) for i in range(3)]
    pool = [entry("r", 10, entered_s=0.0), entry("overdue", 10, entered_s=-1000.0)]
    view = dataclasses.replace(snapshot([worker("p", Role.PREFILL), *full], pool), overcommit_slots=2)
    assert Composition().assign([(e, full) for e in pool], view, random.Random(0)) == ()


def test_two_groups_are_decided_one_after_the_other() -> None:
    view, feasible = Fleet(4, workers=8, pool=30).build()
    groups = {w.id: "gh"[i % 2] for i, w in enumerate(view.workers.values())}
    workers = {w.id: dataclasses.replace(w, group=groups[w.id]) for w in view.workers.values()}
    pool = [dataclasses.replace(e, group="gh"[i % 2]) for i, (e, _) in enumerate(feasible)]
    view = dataclasses.replace(view, workers=workers, pool=tuple(pool))
    split = {g: [w for w in workers.values() if w.role is Role.DECODE and w.group == g] for g in "gh"}
    made = Composition().assign([(e, split[e.group]) for e in pool], view, random.Random(5))
    order = [groups[a.decision.worker] for a in made]
    assert order == sorted(order)
    assert set(order) == {"g", "h"}
    of = {e.request.attempt_id: e.group for e in pool}
    assert [of[a.attempt_id] for a in made] == order
