"""Tests that every rule of the dispatcher finds a worker without free KV for a whole prompt for its hits, and that hits
which are not there yet are not counted.
"""

from typing import Any

import pytest

from policies.dispatch.dispatcher import Action, DispatchConfig, Dispatcher, Reject, RouteDecode, RoutePrefill
from policies.engine_model.blocks import Stored
from policies.routing.base import RANKED, Reason
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.state import events as ev
from policies.state.views import Request, Role

BLOCK = 16
HEAD = tuple(range(1, 51))
"""A head of 800 tokens."""


def dispatcher(roles: dict[str, Role], kv: int, slots: int = 16, **config: Any) -> Dispatcher:
    policy = JoinShortestQueue()
    d = Dispatcher(DispatchConfig(**config), policy, policy)
    for name, role in roles.items():
        tokens = 1_000_000 if role is Role.PREFILL else kv
        d.handle(ev.EngineUp(0.0, name, role, "g", "n", 64 if role is Role.PREFILL else slots, tokens))
        d.handle(ev.EngineStatus(0.0, name, 0, 0, 0))
    return d


def prompt(attempt_id: str, *tail: int, **facts: Any) -> Request:
    """A prompt of HEAD and one block more, 816 tokens."""
    return Request(attempt_id, 0.0, 816, 64, block_hashes=(*HEAD, *tail), block_tokens=BLOCK, **facts)


def prefilled(d: Dispatcher, request: Request, until_s: float = 30.0) -> list[RouteDecode]:
    d.handle(ev.Arrived(0.0, request))
    actions = d.handle(ev.PrefillDone(0.0, request.attempt_id, until_s, 1, 0))
    return [a for a in actions if isinstance(a, RouteDecode)]


def in_memory(d: Dispatcher, worker: str = "d") -> int:
    return d.state.snapshot(0.0).workers[worker].kv_tokens_in_use


def warm(d: Dispatcher, worker: str) -> None:
    """Tells the router that HEAD is cached on a worker."""
    d.handle(ev.KvBatch(0.0, worker, "e", 0, (Stored(HEAD),)))


PAIR = {"p": Role.PREFILL, "d": Role.DECODE}


def test_a_burst_of_prompts_with_one_head_does_not_overfill_a_worker() -> None:
    # 2,000 tokens take two prompts of 816; each pulls its own copy of the head, because none is cached yet
    d = dispatcher(PAIR, kv=2000)
    sent = [a.attempt_id for i in range(12) for a in prefilled(d, prompt(f"r{i:02d}", 100 + i))]
    assert sent == ["r00", "r01"]
    assert in_memory(d) == 1632
    for attempt_id in sent:
        d.handle(ev.Admitted(1.0, attempt_id))
    warm(d, "d")
    # 368 tokens are free, and each of the others adds 16 now: 16 + 16 more than m_min fit 22 times
    actions = d.handle(ev.EngineStatus(1.0, "d", 2, 0, 1632)) + d.handle(ev.Tick(1.0))
    later = [a.attempt_id for a in actions if isinstance(a, RouteDecode)]
    assert later == [f"r{i:02d}" for i in range(2, 12)]
    assert in_memory(d) == 1632 + 10 * 16


def test_an_entry_whose_lease_ends_is_rescued_by_a_warm_worker_without_prefilling_again() -> None:
    d = dispatcher(PAIR, kv=1000, slots=1)
    assert prefilled(d, prompt("first", 100))
    warm(d, "d")
    assert prefilled(d, prompt("r", 101)) == []
    d.handle(ev.EngineStatus(27.0, "d", 1, 0, 816))
    (made,) = d.handle(ev.Tick(27.0))
    assert isinstance(made, RouteDecode)
    assert (made.decision.worker, made.decision.reason) == ("d", Reason.LEASE_RESCUE)
    assert in_memory(d) == 832


def test_a_rescue_ranks_a_bounded_number_of_workers() -> None:
    many = {f"d{i:02d}": Role.DECODE for i in range(3 * RANKED)}
    d = dispatcher({"p": Role.PREFILL} | many, kv=1000, slots=1)
    for i in range(len(many)):
        assert prefilled(d, Request(f"r{i}", 0.0, 100, 64))
    assert prefilled(d, Request("late", 0.0, 100, 64)) == []
    for name in many:
        d.handle(ev.EngineStatus(27.0, name, 1, 0, 100))
    (made,) = d.handle(ev.Tick(27.0))
    assert isinstance(made, RouteDecode)
    assert [r.worker for r in made.decision.ranking] == sorted(many)[:RANKED]


def test_a_warm_quarantined_worker_is_probed_with_a_prompt_that_it_caches() -> None:
    d = dispatcher(PAIR | {"e": Role.DECODE}, kv=1000, slots=4)
    for attempt_id in ("x", "y"):
        (made,) = prefilled(d, prompt(attempt_id, 100))
        worker = made.decision.worker
        d.handle(ev.Admitted(0.0, attempt_id))
    warm(d, worker)
    d.handle(ev.EngineDown(0.0, ({"d", "e"} - {worker}).pop()))
    d.handle(ev.EngineUp(0.0, "f", Role.DECODE, "g", "n", 4, 100))
    d.handle(ev.EngineStatus(0.0, "f", 0, 0, 100))
    for _ in range(4):
        d.handle(ev.AttemptFailed(0.5, "y", (worker,), "decode", "step"))
    assert d.state.snapshot(0.5).workers[worker].quarantine is not None
    assert prefilled(d, Request("small", 0.0, 10, 64))[0].decision.worker == "f"
    assert prefilled(d, prompt("r", 101)) == []
    # its report ends a silence: the entry that waits is its probe
    (probe,) = d.handle(ev.EngineStatus(3.5, worker, 1, 0, 816))
    assert isinstance(probe, RouteDecode)
    assert (probe.attempt_id, probe.decision.worker, probe.decision.reason) == ("r", worker, Reason.PROBE)


@pytest.mark.parametrize("cached", [True, False])
def test_a_colocated_worker_near_full_kv_is_taken_for_its_hits(cached: bool) -> None:
    d = dispatcher({"c": Role.COLOCATED}, kv=1000)

    def arrives(request: Request) -> list[Action]:
        return d.handle(ev.Arrived(0.0, request))

    assert [type(a) for a in arrives(prompt("first", 100))] == [RoutePrefill]
    if cached:
        warm(d, "c")
    made = arrives(prompt("r", 101))
    assert not any(isinstance(a, Reject) for a in made)
    assert [a.attempt_id for a in made] == (["r"] if cached else [])
    assert in_memory(d, "c") == (832 if cached else 816)
