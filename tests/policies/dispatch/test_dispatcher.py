"""Tests of each rule in the dispatcher's docstring by one literal case, and of its invariants in random histories."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.dispatch.dispatcher import Action, DispatchConfig, Dispatcher, Reject, RouteDecode, RoutePrefill
from policies.engine_model.blocks import Stored
from policies.request.terms import Mode, Terms
from policies.routing.base import Decision, PolicyError, Ranked, Reason
from policies.routing.registry import DECODE, PREFILL, decode_policy, prefill_policy
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.state import events as ev
from policies.state.views import Health, Request, Role


def make(**config: object) -> Dispatcher:
    return Dispatcher(DispatchConfig(**config), JoinShortestQueue(), JoinShortestQueue())  # type: ignore[arg-type]


def engine(
    d: Dispatcher, name: str, role: Role, slots: int = 2, kv: int = 1000, group: str = "g", fresh: bool = True
) -> list[Action]:
    actions = d.handle(ev.EngineUp(0.0, name, role, group, "n", slots, kv))
    if fresh:
        actions += d.handle(ev.EngineStatus(0.0, name, 0, 0, 0))
    return actions


def req(attempt_id: str, **kw: object) -> ev.Arrived:
    facts: dict[str, object] = {"arrived_s": 0.0, "prompt_tokens": 100, "max_tokens": 8} | kw
    facts["terms"] = Terms(**{name: facts.pop(name) for name in Terms._fields if name in facts})  # type: ignore[arg-type]
    return ev.Arrived(float(facts["arrived_s"]), Request(attempt_id, **facts))  # type: ignore[arg-type]


def done(attempt_id: str, now_s: float = 0.0, lease_s: float = 30.0) -> ev.PrefillDone:
    return ev.PrefillDone(now_s, attempt_id, now_s + lease_s, 1, 0)


def pd(**config: object) -> Dispatcher:
    d = make(**config)
    engine(d, "p", Role.PREFILL)
    engine(d, "d", Role.DECODE)
    return d


def one(actions: list[Action]) -> Action:
    assert len(actions) == 1, actions
    return actions[0]


def test_a_request_goes_prefill_pool_decode() -> None:
    d = pd()
    first = one(d.handle(req("r")))
    assert isinstance(first, RoutePrefill)
    assert (first.decision.worker, first.colocated) == ("p", False)
    second = one(d.handle(done("r", 1.0)))
    assert isinstance(second, RouteDecode)
    assert second.decision.worker == "d"


def test_a_night_without_requests_does_not_lengthen_retry_after() -> None:
    """Each request ends 0.5 s after its arrival. So does the first one of the day, the last before a burst that fills
    both slots of the prefill engine and the queue of three.
    """
    d = pd(max_queue=3, status_stale_s=1e9)
    at_s = (0.0, 0.5, 1.0, 30_000.0)
    for n, now_s in enumerate(at_s):
        d.handle(req(f"r{n}", arrived_s=now_s))
        d.handle(ev.Closed(now_s + 0.5, f"r{n}", "cancelled"))
    actions = [action for n in range(6) for action in d.handle(req(f"b{n}", arrived_s=30_001.0))]
    (refused,) = [action for action in actions if isinstance(action, Reject)]
    # half a second for each of three
    assert (refused.reason, refused.retry_after_s) == ("queue_full", pytest.approx(1.5))


def test_without_any_engine_it_is_rejected_at_once_with_503() -> None:
    action = one(make().handle(req("r")))
    assert isinstance(action, Reject)
    assert (action.status, action.reason) == (503, "no_engine")
    assert action.retry_after_s >= 1


def lost() -> Dispatcher:
    """Returns a dispatcher that has lost all its engines at 10 s, as a router does that stood still."""
    d = pd()
    for name in ("p", "d"):
        assert d.handle(ev.EngineDown(10.0, name)) == []
    return d


def back(d: Dispatcher, name: str, role: Role, now_s: float) -> list[Action]:
    actions = d.handle(ev.EngineUp(now_s, name, role, "g", "n", 2, 1000))
    return actions + d.handle(ev.EngineStatus(now_s, name, 0, 0, 0))


@pytest.mark.parametrize("mode", [None, Mode.DISAGGREGATED])
def test_requests_wait_a_while_for_engines_that_were_lost_all_at_once(mode: Mode | None) -> None:
    d = lost()
    assert d.handle(req("r", arrived_s=11.0, mode=mode)) == []
    routes = back(d, "d", Role.DECODE, 12.0)
    # without a mode a decode engine may compute the prompt as well
    assert [type(action) for action in routes] == ([RoutePrefill] if mode is None else [])
    routes += back(d, "p", Role.PREFILL, 13.0)
    assert isinstance(one(routes), RoutePrefill)


def test_requests_are_rejected_when_no_engine_is_back_in_time() -> None:
    d = lost()
    assert d.handle(req("r", arrived_s=11.0)) == []
    assert d.handle(ev.Tick(14.9)) == []
    action = one(d.handle(ev.Tick(15.0)))
    assert isinstance(action, Reject)
    assert (action.status, action.reason) == (503, "no_engine")
    assert isinstance(one(d.handle(req("s", arrived_s=20.0))), Reject)


def test_a_prefill_engine_without_a_decode_engine_of_its_group_gets_nothing() -> None:
    d = make()
    engine(d, "p", Role.PREFILL, group="g1")
    engine(d, "d", Role.DECODE, group="g2")
    action = one(d.handle(req("r")))
    assert isinstance(action, RoutePrefill)
    assert action.degraded
    assert action.decision.worker == "d"


def test_no_prefill_tier_means_degraded_local_decode() -> None:
    d = make()
    engine(d, "d", Role.DECODE)
    action = one(d.handle(req("r")))
    assert isinstance(action, RoutePrefill)
    assert (action.colocated, action.degraded) == (True, True)


@pytest.mark.parametrize("status_at_s", [None, 0.0])
def test_a_stale_or_missing_status_counts_as_full(status_at_s: float | None) -> None:
    d = make(status_stale_s=1.0)
    engine(d, "d", Role.DECODE)
    engine(d, "p", Role.PREFILL, fresh=status_at_s is not None)
    assert d.handle(req("r", arrived_s=5.0)) == []
    assert d.queue_size == 1
    actions = d.handle(ev.EngineStatus(5.0, "p", 0, 0, 0))
    assert isinstance(one(actions), RoutePrefill)


def test_back_pressure_above_the_high_water_mark_and_relief() -> None:
    # capacity 1000, mark 0.9: 100 (ours) + 750 (foreign) + 100 = 950 > 900 waits; when 150 fewer are foreign it fits
    d = make(kv_high_water=0.9)
    engine(d, "d", Role.DECODE)
    engine(d, "p", Role.PREFILL, slots=8)
    d.handle(req("a"))
    d.handle(ev.EngineStatus(0.1, "p", 1, 0, 850))
    assert d.handle(req("b")) == []
    assert isinstance(one(d.handle(ev.EngineStatus(0.2, "p", 1, 0, 700))), RoutePrefill)


def test_the_queue_is_served_by_priority_then_arrival() -> None:
    d = make()
    engine(d, "d", Role.DECODE, slots=8)
    engine(d, "p", Role.PREFILL, slots=1)
    d.handle(req("first"))
    for attempt_id, priority in (("low", 5), ("mid", 0), ("mid2", 0), ("high", -1)):
        assert d.handle(req(attempt_id, priority=priority)) == []
    order = []
    attempt_id = "first"
    for _ in range(4):
        action = next(a for a in d.handle(done(attempt_id)) if isinstance(a, RoutePrefill))
        order.append(attempt_id := action.attempt_id)
    assert order == ["high", "mid", "mid2", "low"]


def test_a_full_queue_rejects_the_least_urgent_with_429() -> None:
    d = make(max_queue=2)
    engine(d, "d", Role.DECODE)
    engine(d, "p", Role.PREFILL, fresh=False)  # nothing can be routed
    d.handle(req("a", priority=0))
    d.handle(req("b", priority=9))
    action = one(d.handle(req("c", priority=1)))
    assert isinstance(action, Reject)
    assert (action.attempt_id, action.status, action.reason) == (
        "b",
        429,
        "queue_full",
    )
    late = one(d.handle(req("d", priority=1)))
    assert isinstance(late, Reject)
    assert late.attempt_id == "d"
    assert d.queue_size == d.state.in_flight == 2


def test_a_full_queue_counts_sequences_and_prompt_tokens() -> None:
    d = make(max_queue=4, max_queue_tokens=100)
    engine(d, "d", Role.DECODE)
    engine(d, "p", Role.PREFILL, fresh=False)  # nothing can be routed

    def came(name: str, slots: int, tokens: int, priority: int = 0) -> list[str]:
        request = Request(name, 0.0, tokens, 5, slots, Terms(priority))
        refused = [a for a in d.handle(ev.Arrived(0.0, request)) if isinstance(a, Reject)]
        assert all((a.status, a.reason) == (429, "queue_full") for a in refused)
        return [a.attempt_id for a in refused]

    assert came("a", 2, 10) == came("b", 2, 20, priority=1) == []
    assert (d.queue_size, d.queued_sequences, d.queued_tokens) == (2, 4, 30)
    # one more sequence is one too many: what would be served last is refused, with all of its choices
    assert came("c", 1, 10, priority=2) == ["c"]
    assert came("d", 1, 10) == ["b"]
    assert came("e", 1, 80, priority=1) == []
    # tokens: 100 are there; "e" would be served last
    assert came("f", 1, 1, priority=2) == ["f"]
    assert came("g", 1, 90, priority=1) == ["g"]
    assert came("h", 1, 30) == ["e"]
    assert (d.queue_size, d.queued_sequences, d.queued_tokens) == (3, 4, 50)
    # an urgent one is not let in at the cost of the others where it does not fit beside what is served before it
    assert came("i", 5, 1, priority=-1) == ["i"]
    assert came("j", 4, 1, priority=-1) == ["h", "d", "a"]
    assert d.state.in_flight == d.queue_size == 1


def test_a_request_that_waits_alone_is_never_too_large() -> None:
    d = make(max_queue=1, max_queue_tokens=1)
    engine(d, "d", Role.DECODE)
    engine(d, "p", Role.PREFILL, fresh=False)
    assert d.handle(ev.Arrived(0.0, Request("a", 0.0, 500, 5, 16))) == []
    refused = one(d.handle(req("b", priority=-1)))
    assert isinstance(refused, Reject) and refused.attempt_id == "b"


def test_queue_timeout_is_503() -> None:
    d = make(queue_timeout_s=10.0)
    engine(d, "d", Role.DECODE)
    engine(d, "p", Role.PREFILL, fresh=False)
    d.handle(req("a"))
    assert d.handle(ev.Tick(9.0)) == []
    action = one(d.handle(ev.Tick(10.1)))
    assert isinstance(action, Reject)
    assert (action.status, action.reason) == (503, "queue_timeout")


def test_a_pool_entry_waits_for_a_slot_and_takes_it_when_it_frees() -> None:
    d = make()
    engine(d, "p", Role.PREFILL, slots=8)
    engine(d, "d", Role.DECODE, slots=1)
    for attempt_id in ("a", "b"):
        d.handle(req(attempt_id))
    assert isinstance(one(d.handle(done("a"))), RouteDecode)
    assert d.handle(done("b")) == []
    action = one(d.handle(ev.Closed(1.0, "a", "finished", 8)))
    assert isinstance(action, RouteDecode)
    assert action.attempt_id == "b"


def test_a_pool_entry_never_crosses_groups_or_goes_to_a_draining_worker() -> None:
    d = pd()
    engine(d, "other", Role.DECODE, group="g2", slots=100)
    engine(d, "d2", Role.DECODE)
    d.handle(req("r"))
    d.handle(ev.EngineUp(0.0, "d", Role.DECODE, "g", "n", 2, 1000, Health.DRAINING))
    action = one(d.handle(done("r")))
    assert isinstance(action, RouteDecode)
    assert action.decision.worker == "d2"


def test_a_big_entry_is_passed_over_until_it_starves() -> None:
    # d has 1000 tokens; "hold" takes 500, so "big" (600 + 16) does not fit and "small" (100 + 16) does
    d = make(starvation_s=2.0, status_stale_s=60.0)
    engine(d, "p", Role.PREFILL, slots=8, kv=100_000)
    engine(d, "d", Role.DECODE, slots=8)
    for attempt_id, tokens in (("hold", 500), ("big", 600), ("small", 100), ("small2", 100)):
        d.handle(req(attempt_id, prompt_tokens=tokens))
    assert isinstance(one(d.handle(done("hold"))), RouteDecode)
    assert d.handle(done("big")) == []
    assert one(d.handle(done("small", 1.0))).attempt_id == "small"
    assert d.handle(done("small2", 3.0)) == []
    assert [a.attempt_id for a in d.handle(ev.Closed(4.0, "hold", "finished"))] == ["big", "small2"]


def test_a_lease_that_ends_is_rescued_prefilled_again_or_rejected() -> None:
    d = make(lease_margin_s=8.0, max_prefills=2)
    engine(d, "p", Role.PREFILL, slots=8, kv=100_000)
    engine(d, "d", Role.DECODE, slots=1, kv=250)
    for attempt_id in ("a", "b", "c"):
        d.handle(req(attempt_id))
        d.handle(done(attempt_id))
    # a decodes (100 of 250 tokens, the only slot). At 22 s the leases of b and c are about to end. b fits by KV
    # (100 <= 150) and is rescued without a slot. c does not fit (100 > 50) and is prefilled once more, because the
    # prefill worker's status is fresh.
    d.handle(ev.EngineStatus(21.9, "p", 0, 0, 300))
    d.handle(ev.EngineStatus(21.9, "d", 1, 0, 100))
    actions = {a.attempt_id: a for a in d.handle(ev.Tick(22.1))}
    rescued, again = actions["b"], actions["c"]
    assert isinstance(rescued, RouteDecode)
    assert rescued.decision.reason is Reason.LEASE_RESCUE
    assert isinstance(again, RoutePrefill)
    d.handle(done("c", 23.0))
    last = one(d.handle(ev.Tick(50.0)))
    assert isinstance(last, Reject)
    assert (last.status, last.reason) == (503, "pool_timeout")
    assert d.state.leases == 2  # a and b only


def test_local_requests_never_go_to_a_prefill_engine() -> None:
    d = pd()
    action = one(d.handle(req("r", local=True)))
    assert isinstance(action, RoutePrefill)
    assert action.decision.worker == "d"
    assert not action.degraded


@pytest.mark.parametrize(("mode", "worker"), [(Mode.COLOCATED, "c"), (Mode.DISAGGREGATED, "p")])
def test_a_mode_leaves_only_workers_of_its_kind(mode: Mode, worker: str) -> None:
    d = pd()
    engine(d, "c", Role.COLOCATED, slots=2, kv=1000)
    for attempt_id in ("a", "b"):
        action = one(d.handle(req(attempt_id, mode=mode)))
        assert isinstance(action, RoutePrefill)
        assert (action.decision.worker, action.degraded) == (worker, False)
    # both slots are taken, so the request waits; no other worker may take it
    assert d.handle(req("c", mode=mode)) == []
    assert d.queue_size == 1


def test_a_mode_that_no_ready_worker_has_is_rejected_by_name() -> None:
    d = make()
    engine(d, "p", Role.PREFILL, group="g1")
    engine(d, "d", Role.DECODE, group="g2")
    for mode in Mode:
        action = one(d.handle(req(f"r-{mode}", mode=mode)))
        assert isinstance(action, Reject)
        assert (action.status, action.reason) == (503, f"no_{mode}_engine")
    assert d.queue_size == d.state.in_flight == 0


def test_avoided_workers_are_used_only_when_there_is_no_other() -> None:
    d = pd()
    engine(d, "p2", Role.PREFILL)
    for attempt_id in ("a", "b"):
        action = one(d.handle(req(attempt_id, avoid=("p",))))
        assert isinstance(action, RoutePrefill)
        assert action.decision.worker == "p2"
    action = one(d.handle(req("c", avoid=("p", "p2"))))
    assert isinstance(action, RoutePrefill)
    assert action.decision.worker == "p"


class _Bad(JoinShortestQueue):
    def choose_prefill(self, request, candidates, snapshot, rng):  # type: ignore[no-untyped-def]
        return Decision("nobody", (Ranked("nobody", 0.0, {}),), Reason.LEAST_COST)


def test_a_policy_that_chooses_no_candidate_is_named_and_nothing_changes() -> None:
    d = Dispatcher(DispatchConfig(), _Bad(), JoinShortestQueue())
    engine(d, "p", Role.PREFILL)
    engine(d, "d", Role.DECODE)
    with pytest.raises(PolicyError, match="join_shortest_queue chose nobody"):
        d.handle(req("r"))
    assert d.queue_size == 1
    assert d.state.snapshot(0).workers["p"].prefilling == 0


@pytest.mark.parametrize(
    "config",
    [
        {"max_queue": 0},
        {"kv_high_water": 0.0},
        {"kv_high_water": 1.5},
        {"queue_timeout_s": 0},
        {"max_prefills": 0},
    ],
)
def test_config_out_of_range_is_refused_by_name(config: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        DispatchConfig(**config)  # type: ignore[arg-type]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "done", "admit", "close", "tick", "down", "up", "drain", "warm"]),
        st.integers(0, 7),
        st.integers(1, 900),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from(sorted(PREFILL)), st.sampled_from(sorted(DECODE)))
def test_any_history_keeps_slots_and_ends_at_zero(
    steps,  # type: ignore[no-untyped-def]
    prefill: str,
    decode: str,
) -> None:
    d = Dispatcher(DispatchConfig(max_queue=4), prefill_policy(prefill), decode_policy(decode))
    names = (
        {f"p{i}": Role.PREFILL for i in range(2)}
        | {f"d{i}": Role.DECODE for i in range(2)}
        | {"c": Role.COLOCATED}
    )
    for name, role in names.items():
        engine(d, name, role)
    live: set[str] = set()
    now_s = 0.0
    for what, n, tokens in steps:
        now_s += 0.5
        attempt_id, name = f"r{n}", sorted(names)[n % len(names)]
        event: ev.Event = {
            "arrive": ev.Arrived(
                now_s, Request(attempt_id, now_s, tokens, 8, slots=1 + n % 2, terms=Terms(priority=n % 3))
            ),
            "done": ev.PrefillDone(now_s, attempt_id, now_s + 10, 1, 0),
            "admit": ev.Admitted(now_s, attempt_id),
            "close": ev.Closed(now_s, attempt_id, "finished"),
            "tick": ev.Tick(now_s),
            "down": ev.EngineDown(now_s, name),
            "up": ev.EngineUp(now_s, name, names[name], "g", "n", 2, 1000),
            "drain": ev.EngineUp(now_s, name, names[name], "g", "n", 2, 1000, Health.DRAINING),
            "warm": ev.EngineUp(now_s, name, names[name], "g", "n", 2, 1000, Health.WARM),
        }[what]
        try:
            actions = d.handle(event)
        except ev.StaleEvent:
            continue
        if what == "arrive":
            live.add(attempt_id)
        if what == "close":
            live.discard(attempt_id)
        workers = d.state.snapshot(now_s).workers
        for action in actions:
            if isinstance(action, Reject):
                live.discard(action.attempt_id)
                assert math.isfinite(action.retry_after_s)
                assert action.retry_after_s >= 1
            else:
                chosen = workers[action.decision.worker]
                assert chosen.health is Health.READY
                assert action.attempt_id in live
                if isinstance(action, RouteDecode) and action.decision.reason is not Reason.LEASE_RESCUE:
                    assert chosen.slots_used <= chosen.slots + d.overcommit_slots
        for worker in workers.values():
            if worker.role is Role.COLOCATED:
                assert worker.slots_used <= worker.slots
        assert d.state.in_flight == len(live)
        for other in names:
            if other in workers:
                d.handle(ev.EngineStatus(now_s, other, 0, 0, 0, workers[other].health))
    for attempt_id in live & {r for r in live if d.state.stage(r) is not None}:
        d.handle(ev.Closed(now_s + 1, attempt_id, "cancelled"))
    assert all(
        w.slots_used == w.kv_tokens == w.prefilling == 0 for w in d.state.snapshot(now_s).workers.values()
    )


# ------------------------------------------------------------------------------------------------ change of policies


def test_policies_change_at_run_time_and_decide_what_waits() -> None:
    d = make(kv_high_water=0.1)
    engine(d, "p", Role.PREFILL, kv=500)
    engine(d, "d", Role.DECODE)
    one(d.handle(req("r1")))
    # 200 of 500 tokens are above the high water
    assert d.handle(req("r2")) == []
    change = ev.PoliciesChanged(
        1.0, ev.PolicyChoice("random"), ev.PolicyChoice("netkv", {"step_base_s": 0.5}), {"kv_high_water": 0.9}
    )
    assert one(d.handle(change)).attempt_id == "r2"
    assert (d.prefill.name, d.decode, d.config.kv_high_water) == (
        "random",
        decode_policy("netkv", {"step_base_s": 0.5}),
        0.9,
    )


def test_the_memory_of_the_prefix_indexes_is_that_of_the_configuration_also_when_it_changes() -> None:
    d = make(prefix_index_bytes=2 << 20)
    assert d.state.index_memory.max_bytes == 2 << 20
    for worker, group in (("c0", "one"), ("c1", "other")):
        d.handle(ev.EngineUp(0.0, worker, Role.COLOCATED, group, "n", 8, 10_000))
        d.handle(ev.KvBatch(0.0, worker, "e", 0, (Stored(tuple(range(10_000))),)))
    sizes = [index.blocks for index in d.state.prefix_indexes]
    # 1.75 MiB are for blocks of some 316 bytes; the first group has taken them
    assert sum(sizes) * 316 <= 7 << 18 < (sum(sizes) + 1) * 317 and sizes[1] == 0
    d.handle(ev.PoliciesChanged(1.0, dispatch={"prefix_index_bytes": 4 << 20}))
    d.handle(ev.KvBatch(1.0, "c1", "e", 1, (Stored(tuple(range(10_000))),)))
    assert d.state.prefix_indexes[1].blocks > 0
    assert d.state.index_memory.taken_bytes <= 4 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"prefill": ev.PolicyChoice("best")},
            r"prefill policy 'best' is not known: choose one of cache_aware",
        ),
        ({"decode": ev.PolicyChoice("pd_heatmap")}, r"decode policy 'pd_heatmap' is not known"),
        ({"decode": ev.PolicyChoice("random", {"x": 1})}, r"has no parameter 'x': it takes none"),
        (
            {"decode": ev.PolicyChoice("power_of_two", {"choices": 0})},
            r"choices is 0: it must be a whole number 1\.\.",
        ),
        ({"dispatch": {"max_queue": 0}}, r"max_queue is 0: it must be a whole number >= 1"),
        ({"dispatch": {"max_queue": "9"}}, r"max_queue is '9': it must be a whole number"),
        ({"dispatch": {"kv_high_water": True}}, r"kv_high_water is True: it must be a number"),
        ({"dispatch": {"seed": 3}}, r"'seed' cannot be changed at run time; max_queue, "),
    ],
)
def test_a_change_that_is_wrong_anywhere_changes_nothing(change: dict[str, object], message: str) -> None:
    d = pd()
    before = (d.prefill, d.decode, d.config)
    good = {
        "prefill": ev.PolicyChoice("random"),
        "decode": ev.PolicyChoice("random"),
        "dispatch": {"max_queue": 2},
    }
    with pytest.raises(ValueError, match=message):
        d.handle(ev.PoliciesChanged(1.0, **(good | change)))  # type: ignore[arg-type]
    assert (d.prefill, d.decode, d.config) == before
    assert [type(a) for a in d.handle(req("r"))] == [RoutePrefill]
