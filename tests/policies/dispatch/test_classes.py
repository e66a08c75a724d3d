"""Classes that share service by a ratio, and classes of which the more urgent one gets all: in queue and pool."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.base import ADMITTED, Case, Judgement, Outlook
from policies.dispatch.dispatcher import Action, Reject, RouteDecode, RoutePrefill
from policies.dispatch.gate import Gate
from policies.fairness.base import FairnessPolicy, Turn
from policies.fairness.none import NoFairness
from policies.fairness.vtc import VirtualTokenCounter
from policies.request.classes import class_weight
from policies.request.terms import Terms
from policies.state import events as ev
from policies.state.views import Request
from tests.policies.dispatch.test_sharing import Fleet, sent


def weighted(ratio: float = 4.0, slack: float = 0.0, credit: float = 0.0) -> VirtualTokenCounter:
    return VirtualTokenCounter(slack_tokens=slack, credit_tokens=credit, ahead_s=0.0, class_ratio=ratio)


def class_counters(fleet: Fleet, place: str = "queue") -> Mapping[int, float]:
    shares = fleet.d.sharing._queued if place == "queue" else fleet.d.sharing._pooled
    return {priority: shares.class_counter(priority) for priority in (-1, 0, 1)}


def priority_of(fleet: Fleet, name: str) -> int:
    request = fleet.d.state.request(name)
    assert request is not None
    return request.terms.priority


def turn_of(actions: list[Action], kind: type[RoutePrefill | RouteDecode]) -> Turn | None:
    [turn] = [one.turn for one in actions if isinstance(one, kind)]
    return turn


# ------------------------------------------------------------------------------------------------------- the queue


@pytest.mark.parametrize("tenants", ["a", "abc"])
def test_a_class_gets_the_ratio_of_the_next_one_in_the_queue(tenants: str) -> None:
    fleet = Fleet(weighted())
    running, _ = fleet.arrive("a", priority=0)
    for i in range(42):
        for priority in (-1, 0, 1):
            fleet.arrive(tenants[i % len(tenants)], priority=priority)
    served = Counter[int]()
    for _ in range(42):
        [running] = sent(fleet.prefilled(running))
        served[priority_of(fleet, running)] += 1
    # 16 : 4 : 1 of 200 tokens each, twice
    assert served == {-1: 32, 0: 8, 1: 2}


@pytest.mark.parametrize("policy", [NoFairness(), VirtualTokenCounter()], ids=["none", "vtc"])
@pytest.mark.parametrize("tenants", ["a", "ab"])
def test_by_default_a_less_urgent_class_gets_nothing_while_a_more_urgent_one_waits(
    policy: FairnessPolicy, tenants: str
) -> None:
    fleet = Fleet(policy, prefill=1, decode=1, overcommit_slots=0)
    running, _ = fleet.arrive("a")
    names = [fleet.arrive(tenants[i % len(tenants)], priority=i % 3 - 1)[0] for i in range(18)]
    order = []
    for _ in names:
        [running] = sent(fleet.prefilled(running))
        order.append(priority_of(fleet, running))
    assert order == sorted(order)
    # all of them wait in the pool now but the first, which has the only slot; they are served in the same order
    fleet.prefilled(running)
    served = []
    running = "a-1"
    for _ in names:
        [running] = sent(fleet.ended(running), RouteDecode)
        served.append(priority_of(fleet, running))
    assert served == sorted(served)
    assert fleet.d.sharing.counts == (tenants == "ab" and policy != NoFairness())


def test_a_second_class_of_one_tenant_begins_the_counters_only_with_a_ratio() -> None:
    for policy, counts in ((weighted(), True), (VirtualTokenCounter(), False), (NoFairness(), False)):
        fleet = Fleet(policy)
        fleet.arrive("a", priority=0)
        fleet.arrive("a", priority=0)
        assert not fleet.d.sharing.counts
        fleet.arrive("a", priority=1)
        assert fleet.d.sharing.counts is counts


def test_a_turn_shows_the_counters_of_the_classes_that_waited() -> None:
    fleet = Fleet(weighted())
    running, _ = fleet.arrive("a")
    for priority in (1, 1, 0, 0):
        fleet.arrive("a", priority=priority)
    turns = []
    for _ in range(4):
        actions = fleet.prefilled(running)
        [running] = sent(actions)
        turns.append(turn_of(actions, RoutePrefill))
    # "batch" waited first, and both begin at 0; it costs 200 / (1 / 4), "standard" 200 each
    assert [(turn.tenant, turn.tenants, turn.others, turn.classes) if turn else None for turn in turns] == [
        ("a", 1, {}, {"1": 0.0, "0": 0.0}),
        ("a", 1, {}, {"0": 0.0, "1": 800.0}),
        ("a", 1, {}, {"0": 200.0, "1": 800.0}),
        None,
    ]
    assert class_counters(fleet) == {-1: 0.0, 0: 400.0, 1: 1600.0}


def test_what_a_request_used_is_settled_with_its_class_as_well() -> None:
    fleet = Fleet(weighted(), slots=9)
    for priority in (0, 1):
        name, _ = fleet.arrive("y", priority=priority, prompt=0, predicted=0.0)
        fleet.d.handle(ev.Closed(fleet.now_s, name, "cancelled"))
    name, _ = fleet.arrive("a", weight=2.0, priority=1, prompt=100, predicted=50.0)
    # a class counts what its requests cost, whatever the weights of the tenants: 200 at a quarter
    assert (class_counters(fleet)[1], fleet.counters(priority=1)["a"]) == (800.0, 100.0)
    fleet.prefilled(name, cached=60)
    assert class_counters(fleet)[1] == class_counters(fleet, "pool")[1] == 4 * 140
    fleet.ended(name, tokens=10)
    assert class_counters(fleet)[1] == class_counters(fleet, "pool")[1] == 4 * 60


def test_a_full_queue_rejects_from_the_class_with_the_longest_line_for_its_weight() -> None:
    fleet = Fleet(weighted(), max_queue=6)
    fleet.arrive("a")
    names = [fleet.arrive("a", priority=0)[0] for _ in range(6)]
    name, [rejected] = fleet.arrive("a", priority=1)
    # the first of "batch" is served by 4 * 200, the last of "standard" by 6 * 200
    assert isinstance(rejected, Reject) and rejected.attempt_id == names[-1]
    assert rejected.turn is not None and list(rejected.turn.classes) == ["0", "1"]
    name, [rejected] = fleet.arrive("a", priority=1)
    assert rejected.attempt_id == name


def test_a_full_queue_keeps_the_less_urgent_of_others_from_a_flood_that_is_more_urgent() -> None:
    fleet = Fleet(VirtualTokenCounter(), max_queue=8)
    fleet.arrive("c")
    standard = [fleet.arrive("b")[0] for _ in range(8)]
    lost = []
    for _ in range(100):
        name, actions = fleet.arrive("a", priority=-1)
        lost += [one.attempt_id for one in actions if isinstance(one, Reject) and one.attempt_id != name]
    # each has 4 of 8 places; the flood is served first all the same
    assert lost == standard[:3:-1]
    assert [priority_of(fleet, one.attempt_id) for one in fleet.d._queue.waiting()] == [0] * 4 + [-1] * 4
    head = fleet.d._queue.head()
    assert head is not None and head.terms.tenant == "a"


# -------------------------------------------------------------------------------------------------------- the pool


@pytest.mark.parametrize("decode", ["join_shortest_queue", "composition", "balance_route_0", "netkv"])
def test_classes_take_turns_in_the_pool_whatever_order_the_decode_policy_has(decode: str) -> None:
    fleet = Fleet(weighted(3.0), prefill=99, decode_policy_name=decode, overcommit_slots=0)
    running, _ = fleet.arrive("c")
    fleet.prefilled(running)
    for name in [fleet.arrive("a", priority=i % 2)[0] for i in range(24)]:
        assert not sent(fleet.prefilled(name), RouteDecode)
    served = Counter[int]()
    for _ in range(12):
        actions = fleet.ended(running)
        [running] = sent(actions, RouteDecode)
        turn = turn_of(actions, RouteDecode)
        served[priority_of(fleet, running)] += 1
        assert turn is not None and len(turn.classes) == 2
        own, other = turn.classes.values()
        assert own <= other
    assert served == {0: 9, 1: 3}


@pytest.mark.parametrize("decode", ["balance_route_0", "balance_route_h", "composition"])
def test_an_entry_that_is_overdue_by_its_objective_overtakes_its_own_class_only(decode: str) -> None:
    fleet = Fleet(NoFairness(), prefill=9, decode_policy_name=decode, overcommit_slots=0)
    running, _ = fleet.arrive("c")
    fleet.prefilled(running)
    names = {}
    for name, priority, slo_s in (("batch", 1, None), ("late", 1, 3.0), ("urgent", -1, None)):
        # the largest goes first where nothing else decides
        prompt = 500 if name == "batch" else 100
        names[name], _ = fleet.arrive(name, priority=priority, prompt=prompt, ttft_slo_s=slo_s)
        assert not sent(fleet.prefilled(names[name]), RouteDecode)
    fleet.now_s = 2.5
    order = []
    for _ in names:
        [running] = sent(fleet.ended(running), RouteDecode)
        order.append(running)
    assert order == [names["urgent"], names["late"], names["batch"]]


def test_room_that_the_class_with_the_turn_cannot_use_goes_to_the_others() -> None:
    fleet = Fleet(weighted(), prefill=9, slots=2, kv=1000, overcommit_slots=0, starvation_s=float("inf"))
    running, _ = fleet.arrive("c", prompt=700)
    fleet.prefilled(running)
    large, _ = fleet.arrive("a", prompt=900, priority=0)
    small, _ = fleet.arrive("a", prompt=50, priority=1)
    fleet.d.sharing._pooled.enter(1, "a")
    fleet.d.sharing._pooled.charge_class(1, 1e6)
    fleet.prefilled(large)
    assert sent(fleet.prefilled(small), RouteDecode) == [small]


def test_a_flood_of_one_class_beyond_what_a_scan_looks_at_does_not_hide_the_others() -> None:
    fleet = Fleet(weighted(), prefill=40, tick_entries=4, overcommit_slots=0)
    running, _ = fleet.arrive("c")
    fleet.prefilled(running)
    for name in [fleet.arrive("a", priority=-1)[0] for _ in range(30)]:
        fleet.prefilled(name)
    name, _ = fleet.arrive("a", priority=0)
    fleet.prefilled(name)
    seen = []
    for _ in range(6):
        [running] = sent(fleet.ended(running), RouteDecode)
        seen.append(running)
    # it has a fifth of the turns
    assert name in seen


# ------------------------------------------------------------------------------------------------------- admission


def test_a_less_urgent_request_no_longer_waits_for_all_that_is_more_urgent() -> None:
    taken = {}
    for ratio in (None, 4.0):
        policy = VirtualTokenCounter(slack_tokens=0.0, credit_tokens=0.0, class_ratio=ratio)
        fleet = Fleet(policy, slots=999)
        fleet.d.handle(ev.PoliciesChanged(0.0, admission=ev.PolicyChoice("by_wait", {"margin": 0.0})))
        # the only prefill engine computes 1000 tokens (with what each prompt counts more) in a second
        fleet.d.handle(ev.Tick(0.0))
        running, _ = fleet.arrive("a", prompt=872)
        for _ in range(3):
            fleet.now_s += 1.0
            fleet.prefilled(running)
            fleet.d.handle(ev.Tick(fleet.now_s))
            running, _ = fleet.arrive("a", prompt=872)
        for _ in range(60):
            fleet.arrive("a", prompt=872, priority=-1)
        # before a first request of priority 0 there is at most the ratio of itself, not sixty seconds
        name, actions = fleet.arrive("a", prompt=872, ttft_slo_s=30.0)
        taken[ratio] = name not in sent(actions, Reject)
    assert taken == {None: False, 4.0: True}


class Asked:
    """An admission policy that admits everything and keeps the case about which it was asked last."""

    watches = True

    def judge(self, case: Case, outlook: Outlook) -> Judgement:
        self.case = case
        return ADMITTED


@pytest.mark.parametrize("ratio", [None, 4.0])
def test_at_its_turn_a_request_is_shown_apart_from_what_is_only_expected_to_come(ratio: float | None) -> None:
    fleet = Fleet(replace(weighted(), class_ratio=ratio), prefill=9, slots=99)
    fleet.d.handle(ev.PoliciesChanged(0.0, admission=ev.PolicyChoice("by_wait")))
    fleet.arrive("a", priority=0)
    urgent = [fleet.arrive("a", priority=-1)[0] for _ in range(4)]
    for name in urgent[1:]:
        fleet.d.handle(ev.Closed(fleet.now_s, name, "cancelled"))
    request = Request("r", fleet.now_s, 100, 100, terms=Terms(ttft_slo_s=30.0, tenant="a"))
    asked = Asked()
    gate = Gate(fleet.d.state, asked)  # type: ignore[arg-type]  # no policy of a registry
    for _ in range(4):
        gate.admitted(Request("u", fleet.now_s, 100, 100, terms=Terms(-1)), fleet.now_s)
    gate.has_turn(request, fleet.d.state.snapshot(fleet.now_s, ()), fleet.d._fleet())
    # two prompts are computed; 4 * ln 2 / 10 * 30 = 8.3 urgent ones are expected to come in 30 s, of which the ratio
    # lets 4 * (1 + 1) = 8 pass it
    there, shown = asked.case.without_slot_now, asked.case.without_slot
    if ratio is None:
        assert there is None and shown.sequences == 2
    else:
        assert there is not None and (there.sequences, shown.sequences) == (2, 1 + 8)


# ------------------------------------------------------------------------------------------------------ properties


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ratio=st.sampled_from([1.0, 2.0, 5.5]),
    slack=st.sampled_from([0.0, 1000.0]),
    place=st.sampled_from(["queue", "pool"]),
    tenants=st.sampled_from(["a", "ab"]),
)
def test_classes_that_wait_all_the_time_get_service_by_the_ratio_within_a_constant(
    seed: int, ratio: float, slack: float, place: str, tenants: str
) -> None:
    rng = random.Random(seed)
    pool = place == "pool"
    policy = replace(weighted(ratio, slack), ahead_tokens=1e12)
    fleet = Fleet(policy, prefill=400 if pool else 1, decode=1 if pool else 400, overcommit_slots=0)
    running, _ = fleet.arrive("z")
    if pool:
        fleet.prefilled(running)
    most, costs, outputs = 0.0, dict[str, float](), {running: 50}
    of, waiting = dict[str, int](), Counter[int]()
    for i in rng.sample(range(180), 180):
        priority = i % 3 - 1
        prompt, output = rng.randrange(1, 400), rng.randrange(1, 200)
        name, _ = fleet.arrive(
            rng.choice(tenants),
            priority=priority,
            prompt=prompt,
            predicted=float(output),
            weight=rng.choice([1.0, 3.0]),
        )
        of[name], outputs[name], costs[name] = priority, output, prompt + 2 * output
        most = max(most, costs[name] / class_weight(priority, ratio))
        waiting[priority] += 1
        if pool:
            fleet.prefilled(name)
    served = Counter[int]()
    while min(waiting[priority] for priority in (-1, 0, 1)) > 0:
        # each has the output that was foreseen, so that nothing is settled
        actions = fleet.ended(running, outputs[running]) if pool else fleet.prefilled(running)
        # work conserving: there is room for one, and one is sent
        [running] = sent(actions, RouteDecode if pool else RoutePrefill)
        priority = of[running]
        waiting[priority] -= 1
        served[priority] += costs[running] / class_weight(priority, ratio)
        spread = max(served[p] for p in (-1, 0, 1)) - min(served[p] for p in (-1, 0, 1))
        assert spread <= most + slack + 1e-6
    assert sum(served.values()) > 0
