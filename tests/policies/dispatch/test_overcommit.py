"""NetKV's feasible set in the dispatcher: by memory with b_eff, and full workers within `overcommit_slots` whose queue
is a cost. The situations are the paper's (IV-A to IV-C).
"""

from typing import Any

import pytest

from policies.dispatch.dispatcher import DispatchConfig, Dispatcher, RouteDecode
from policies.engine_model.blocks import Stored
from policies.network.oracle import Oracle
from policies.routing.base import DecodePolicy, Overcommit, overcommit_of
from policies.routing.registry import DECODE, decode_policy
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.state import events as ev
from policies.state.views import Request, Role

# 100 MB of KV: 10 ms to the near worker, 100 ms to the far one
ORACLE = Oracle({1: 1e10, 3: 1e9}, tier_map={("p", "near"): 1, ("p", "far"): 3})
KV_BYTES = 100_000_000
BLOCK = 16


def dispatcher(decode: DecodePolicy, slots: int = 2, kv: int = 100_000, **config: Any) -> Dispatcher:
    d = Dispatcher(DispatchConfig(**config), JoinShortestQueue(), decode)
    for name, role in (("p", Role.PREFILL), ("near", Role.DECODE), ("far", Role.DECODE)):
        size = (64, 1_000_000) if role is Role.PREFILL else (slots, kv)
        d.handle(ev.EngineUp(0.0, name, role, "g", "n", *size))
        d.handle(ev.EngineStatus(0.0, name, 0, 0, 0))
    d.handle(ev.OracleRefreshed(0.0, ORACLE))
    return d


def send(
    d: Dispatcher,
    attempt_id: str,
    tokens: int = 100,
    hashes: tuple[int, ...] = (),
    kv_bytes: int = KV_BYTES,
) -> RouteDecode | None:
    block_tokens = BLOCK if hashes else 0
    request = Request(attempt_id, 0.0, tokens, 64, block_hashes=hashes, block_tokens=block_tokens)
    d.handle(ev.Arrived(0.0, request))
    actions = d.handle(ev.PrefillDone(0.0, attempt_id, 30.0, kv_bytes, 0))
    made = [a for a in actions if isinstance(a, RouteDecode)]
    for action in made:
        d.handle(ev.Admitted(0.0, action.attempt_id))  # its KV has moved
    return made[0] if made else None


def terms(route: RouteDecode | None, worker: str) -> dict[str, float]:
    assert route is not None
    return next(dict(r.terms) for r in route.decision.ranking if r.worker == worker)


def placed(d: Dispatcher, n: int) -> list[str | None]:
    routes = [send(d, f"r{i}") for i in range(n)]
    return [route.decision.worker if route else None for route in routes]


def netkv(step_s: float = 0.02, queue: str = "iterations") -> DecodePolicy:
    return decode_policy("netkv", {"step_base_s": step_s, "step_per_seq_s": 0.0, "queue": queue})


def test_a_near_worker_that_is_full_for_one_step_is_preferred_to_a_far_free_one_and_explain_says_so() -> None:
    d = dispatcher(netkv(), overcommit_slots=2)
    # two run, the third is first in the queue: T_queue = (1 - 0) * 20 ms for the fourth
    assert placed(d, 3) == ["near"] * 3
    route = send(d, "fourth")
    assert route is not None
    assert route.decision.worker == "near"
    near, far = terms(route, "near"), terms(route, "far")
    assert (near["queue_s"], near["queued"]) == (pytest.approx(0.02), 1.0)
    assert (near["transfer_s"], near["first_step_s"]) == (pytest.approx(0.01), pytest.approx(0.02))
    assert (far["queue_s"], far["transfer_s"]) == (0.0, pytest.approx(0.1))
    assert "queued" not in far
    assert route.decision.ranking[0].cost == pytest.approx(0.01 + 0.02 + 0.02)


def test_the_far_free_worker_wins_where_the_queue_costs_more_than_the_transfer() -> None:
    # a step of 0.2 s: the fourth would wait 0.2 s near, and its KV moves 0.09 s longer to the far one
    assert placed(dispatcher(netkv(0.2), overcommit_slots=2), 4) == ["near", "near", "near", "far"]


@pytest.mark.parametrize(
    # a batch of two frees a slot in half of the usual output: one step of 20 ms, or ten
    ("output_tokens", "chosen", "queue_s"),
    [(2, "near", 0.02), (20, "far", 0.2)],
)
def test_the_defaults_prefer_a_near_worker_that_is_full_for_one_step_to_a_far_free_one_and_say_so(
    output_tokens: int, chosen: str, queue_s: float
) -> None:
    d = dispatcher(decode_policy("netkv", {"step_base_s": 0.02, "step_per_seq_s": 0.0}))
    assert placed(d, 2) == ["near"] * 2
    for name in ("r0", "r1"):
        d.handle(ev.ProgressedMany(0.0, ((name, output_tokens),)))
        d.handle(ev.Closed(0.0, name, "finished", output_tokens))
    assert [send(d, f"s{i}").decision.worker for i in range(2)] == ["near"] * 2  # type: ignore[union-attr]
    route = send(d, "third")
    assert route is not None and route.decision.worker == chosen
    near, far = terms(route, "near"), terms(route, "far")
    assert near["queue_s"] == pytest.approx(queue_s) and near["queued"] == 0.0
    assert (near["transfer_s"], far["transfer_s"]) == (pytest.approx(0.01), pytest.approx(0.1))
    assert far["queue_s"] == 0.0 and "queued" not in far


def test_the_slots_bound_the_queue_and_nothing_else() -> None:
    assert placed(dispatcher(netkv(), overcommit_slots=0), 5) == ["near", "near", "far", "far", None]
    assert placed(dispatcher(netkv(), overcommit_slots=1), 7) == ["near"] * 3 + ["far"] * 3 + [None]


def test_an_entry_that_the_policy_leaves_in_the_pool_takes_the_slot_that_frees_first() -> None:
    d = dispatcher(netkv(queue="slot"), overcommit_slots=2)
    # nothing has ended yet, so the queue is the paper's: far is next when the near one has its two more
    assert placed(d, 7) == ["near"] * 4 + ["far"] * 2 + [None]
    (route,) = [a for a in d.handle(ev.Closed(1.0, "r4", "finished")) if isinstance(a, RouteDecode)]
    assert (route.attempt_id, route.decision.worker) == ("r6", "far")


def test_an_entry_in_the_pool_goes_as_soon_as_a_place_in_the_queue_is_free() -> None:
    d = dispatcher(netkv(), overcommit_slots=1)
    assert placed(d, 7)[-1] is None
    (route,) = [a for a in d.handle(ev.Closed(1.0, "r0", "finished")) if isinstance(a, RouteDecode)]
    assert (route.attempt_id, route.decision.worker) == ("r6", "near")


@pytest.mark.parametrize("name", sorted(DECODE))
def test_only_policies_that_weigh_the_queue_are_offered_full_workers(name: str) -> None:
    policy = decode_policy(name)
    d = dispatcher(policy, slots=1, overcommit_slots=3)
    found = placed(d, 3)
    known = dict.fromkeys(("netkv", "composition"), Overcommit.BESIDE_FREE_SLOTS)
    assert overcommit_of(policy) is known.get(name, Overcommit.NEVER)
    assert sorted(filter(None, found[:2])) == ["far", "near"] or name in known
    assert found[2] is None or name in known
    assert overcommit_of(netkv()) is Overcommit.ALWAYS
    assert placed(dispatcher(netkv(), slots=1, overcommit_slots=3), 3)[2] is not None


@pytest.mark.parametrize("name", sorted(DECODE))
def test_every_policy_may_be_made_to_send_at_once_or_to_wait(name: str) -> None:
    policy = decode_policy(name)
    at_once = dispatcher(policy, slots=1, overcommit_slots=3, overcommit="always")
    # a policy that weighs entries against each other, or a free slot against a queue, may keep one for later
    waits_itself = name == "netkv" or not hasattr(policy, "choose_decode")
    assert waits_itself or None not in placed(at_once, 6)
    assert at_once.overcommit_slots == 3
    waits = dispatcher(decode_policy(name), slots=1, overcommit_slots=3, overcommit="never")
    assert placed(waits, 3)[2] is None
    assert waits.overcommit_slots == 0


def test_the_composition_queues_near_while_a_far_slot_is_free_and_waits_in_the_pool_when_none_is() -> None:
    params = {"step_base_s": 0.02, "step_per_seq_s": 0.0}
    d = dispatcher(decode_policy("composition", params), overcommit_slots=2)
    assert placed(d, 2) == ["near"] * 2
    # usual KV is not worth it: whoever takes a near slot takes it from the next one (the rent)
    small = send(d, "small")
    assert small is not None
    assert small.decision.worker == "far"
    # ten times the KV: 0.1 s near, 1 s far
    large = [send(d, f"large{i}", kv_bytes=10 * KV_BYTES) for i in range(2)]
    assert [route.decision.worker if route else None for route in large] == ["near", "near"]
    assert [terms(route, "near")["queue_s"] for route in large] == [0.0, pytest.approx(0.02)]
    assert terms(large[1], "near")["cost_s"] == pytest.approx(0.1 + 0.02 + 0.02)
    assert terms(large[1], "near")["free_slots"] == 0.0
    # near has its two more: the far slot is next, and what comes then waits for whichever slot frees first
    assert [send(d, f"s{i}", kv_bytes=10 * KV_BYTES) is not None for i in range(2)] == [True, False]
    slots = {name: w.slots_used for name, w in d.state.snapshot(0.0).workers.items()}
    assert slots == {"p": 0, "near": 4, "far": 2}
    (route,) = [a for a in d.handle(ev.Closed(1.0, "small", "finished")) if isinstance(a, RouteDecode)]
    assert (route.attempt_id, route.decision.worker) == ("s1", "far")


def warm(d: Dispatcher, blocks: int = 50) -> tuple[int, ...]:
    """Leaves one request of `blocks` blocks decoding on the near worker, with its prompt cached there."""
    head = tuple(range(1, blocks + 1))
    assert send(d, "first", BLOCK * blocks, head) is not None
    d.handle(ev.KvBatch(0.0, "near", "e", 0, (Stored(head),)))
    d.handle(ev.EngineStatus(0.0, "near", 1, 0, BLOCK * blocks))
    return head


@pytest.mark.parametrize("policy", ["netkv", "composition", "join_shortest_queue"])
def test_a_warm_worker_near_full_kv_is_taken_for_its_hits(policy: str) -> None:
    # 1,000 tokens, 800 of them in use and cached. A prompt of 820 has 20 that are not there: 20 + 16 <= 200
    d = dispatcher(decode_policy(policy), slots=4, kv=1000)
    d.handle(ev.EngineDown(0.0, "far"))
    head = warm(d)
    assert send(d, "cold", 820, tuple(range(1001, 1052))) is None  # 836 > 200
    route = send(d, "warm", 820, (*head, 99))
    assert route is not None
    assert route.decision.worker == "near"
    worker = d.state.snapshot(0.0).workers["near"]
    assert (worker.kv_tokens, worker.shared_kv_tokens, worker.free_kv_tokens) == (1620, 800, 180)


def test_the_hits_are_worth_the_far_warm_worker_against_the_near_cold_one() -> None:
    # nothing moves to the warm worker (0.1 s less all of it), 10 ms to the near one
    d = dispatcher(netkv(), slots=4, kv=1000)
    head = tuple(range(1, 51))
    d.handle(ev.EngineDown(0.0, "near"))
    send(d, "first", 800, head)
    d.handle(ev.KvBatch(0.0, "far", "e", 0, (Stored(head),)))
    d.handle(ev.EngineUp(0.0, "near", Role.DECODE, "g", "n", 4, 1000))
    d.handle(ev.EngineStatus(0.0, "near", 0, 0, 0))
    route = send(d, "warm", 800, head)
    assert route is not None
    assert route.decision.worker == "far"
    assert terms(route, "far")["transfer_s"] == 0.0


def test_a_hit_on_idle_blocks_saves_no_memory() -> None:
    # `first` has ended: its 800 tokens are cached and idle, so they are part of the free KV. 400 foreign tokens
    # leave 600 free, and the 800 tokens of the hit must stay: 820 do not fit
    d = dispatcher(netkv(), slots=4, kv=1000)
    d.handle(ev.EngineDown(0.0, "far"))
    head = warm(d)
    send(d, "other", 50)
    d.handle(ev.Closed(0.0, "first", "finished"))
    d.handle(ev.EngineStatus(0.0, "near", 1, 0, 450))
    assert d.state.snapshot(0.0).workers["near"].free_kv_tokens == 550
    assert send(d, "warm", 820, (*head, 99)) is None
