"""Tests that the reducer feeds one prefix index per engine group, and that snapshots give hits in tokens."""

import pytest

from policies.engine_model.blocks import Removed, Stored
from policies.state import events as ev
from policies.state.prefix_index import Wanted
from policies.state.reducer import ClusterState
from policies.state.views import Request, Role

REQUEST = Request("r", 0.0, prompt_tokens=40, max_tokens=8, block_hashes=(1, 2, 3), block_tokens=16)


def cluster() -> ClusterState:
    state = ClusterState()
    for name, group in (("a", "g"), ("b", "g"), ("x", "other")):
        state.apply(ev.EngineUp(0.0, name, Role.DECODE, group, "n", 8, 10_000))
    return state


def stored(state: ClusterState, worker: str, *hashes: int, seq: int = 0) -> None:
    state.apply(ev.KvBatch(0.0, worker, "e", seq, (Stored(hashes),)))


def hits(state: ClusterState, request: Request = REQUEST) -> dict[str, int]:
    return dict(state.snapshot(0.0).hits.tokens(request))


def test_hits_are_in_tokens_and_never_more_than_the_prompt() -> None:
    state = cluster()
    assert hits(state) == {}
    stored(state, "a", 1, 2, 3)
    stored(state, "b", 1)
    stored(state, "x", 1, 2)
    assert hits(state) == {"a": 40, "b": 16, "x": 32}
    assert hits(state, Request("q", 0.0, 40, 8)) == {}


def test_answers_follow_every_event_also_for_a_request_that_was_asked_before() -> None:
    state = cluster()
    state.apply(ev.Arrived(0.0, REQUEST))
    stored(state, "a", 1, 2, 3)
    assert hits(state) == {"a": 40}
    state.apply(ev.KvBatch(0.0, "a", "e", 1, (Removed((2,)),)))
    assert hits(state) == {"a": 16}
    state.apply(ev.KvSnapshot(0.0, "b", "e", 7, (Stored((1, 2)),)))
    assert hits(state) == {"a": 16, "b": 32}


def test_a_retry_with_a_longer_prompt_is_looked_up_anew() -> None:
    state = cluster()
    stored(state, "a", 1, 2, 3, 4)
    state.apply(ev.Arrived(0.0, REQUEST))
    assert hits(state) == {"a": 40}
    longer = Request("r", 0.0, 64, 8, block_hashes=(1, 2, 3, 4), block_tokens=16)
    state.apply(ev.Arrived(1.0, longer))
    assert hits(state, longer) == {"a": 64}


def test_a_dead_worker_is_fenced_out_at_once_and_one_of_another_group_too() -> None:
    state = cluster()
    stored(state, "a", 1, 2)
    stored(state, "b", 1, 2)
    state.apply(ev.EngineDown(1.0, "a"))
    assert hits(state) == {"b": 32}
    state.apply(ev.EngineUp(2.0, "b", Role.DECODE, "new", "n", 8, 10_000))
    assert hits(state) == {}


def test_events_of_an_unknown_worker_are_stale_and_gaps_are_visible() -> None:
    state = cluster()
    with pytest.raises(ev.StaleEvent):
        stored(state, "nobody", 1)
    stored(state, "a", 1, seq=3)
    index = state.prefix_index("g")
    assert index is not None
    assert index.wanted == {"a": Wanted("e", 0, 2)}
