"""Tests that KV blocks of several requests are counted once, whatever the order of events, and that hits on them count
as KV in use.
"""

import contextlib
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.engine_model.blocks import Stored, block_hashes
from policies.routing.base import PolicyError
from policies.routing.registry import decode_policy, prefill_policy
from policies.state import events as ev
from policies.state.held_blocks import HeldBlocks
from policies.state.reducer import ClusterState
from policies.state.views import Request, Role
from tests.policies.random_events import Life

BLOCK = 16


def request(attempt_id: str, *hashes: int, rest: int = 0) -> Request:
    """A prompt of the blocks `hashes` and `rest` more tokens."""
    return Request(attempt_id, 0.0, BLOCK * len(hashes) + rest, 8, block_hashes=hashes, block_tokens=BLOCK)


# prompts of few different tokens, so that many have an equal head
CHAINS = st.lists(
    st.lists(st.integers(0, 2), max_size=6).map(lambda tokens: block_hashes(tokens, 1)), max_size=8
)


@given(CHAINS, st.randoms())
def test_shared_tokens_are_the_sum_minus_the_union(chains: list[tuple[int, ...]], rng: random.Random) -> None:
    blocks, held = HeldBlocks(), []
    for i, chain in enumerate(chains):
        held.append(request(f"r{i}", *chain))
        blocks.add(held[-1])
        if rng.random() < 0.3:
            blocks.remove(held.pop(rng.randrange(len(held))))
        union = {block for one in held for block in one.block_hashes}
        assert blocks.shared_tokens == BLOCK * (sum(len(one.block_hashes) for one in held) - len(union))
        for asked in chains:
            head = next((n for n, block in enumerate(asked) if block not in union), len(asked))
            assert blocks.tokens_held(request("q", *asked)) == BLOCK * head
    for one in held:
        blocks.remove(one)
    assert (blocks.shared_tokens, len(blocks.holders)) == (0, 0)


def cluster() -> ClusterState:
    state = ClusterState()
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        state.apply(ev.EngineUp(0.0, name, role, "g", "n", slots=8, kv_capacity_tokens=1000))
    return state


def decode(state: ClusterState, one: Request, worker: str = "d") -> None:
    state.apply(ev.Arrived(0.0, one))
    state.apply(ev.PrefillRouted(0.0, one.attempt_id, "p", colocated=False))
    state.apply(ev.PrefillDone(0.0, one.attempt_id, 30.0, 1, 0))
    state.apply(ev.DecodeRouted(0.0, one.attempt_id, worker))


def test_a_system_prompt_of_three_requests_is_in_memory_once() -> None:
    # 10 blocks of 16 tokens are the same: 3 * (160 + 20) tokens to read, 160 + 3 * 20 in memory
    state, head = cluster(), tuple(range(10))
    for name in "abc":
        decode(state, request(name, *head, rest=20))
    worker = state.snapshot(0.0).workers["d"]
    assert (worker.kv_tokens, worker.shared_kv_tokens, worker.free_kv_tokens) == (540, 320, 1000 - 220)
    assert state.snapshot(0.0).workers["p"].shared_kv_tokens == 320
    for name in "abc":
        state.apply(ev.Admitted(1.0, name))
    assert state.snapshot(1.0).workers["p"].shared_kv_tokens == 0
    state.apply(ev.Closed(2.0, "a", "finished"))
    assert state.snapshot(2.0).workers["d"].free_kv_tokens == 1000 - 200
    state.apply(ev.Closed(2.0, "b", "finished"))
    state.apply(ev.Closed(2.0, "c", "finished"))
    worker = state.snapshot(2.0).workers["d"]
    assert (worker.kv_tokens, worker.shared_kv_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("reported", "foreign"),
    # 220 tokens are ours: the rest of the report is another's, or copies that the engine keeps of one block
    [(0, 0), (220, 0), (300, 80), (540, 320)],
)
def test_what_a_report_shows_beyond_the_union_is_foreign(reported: int, foreign: int) -> None:
    state, head = cluster(), tuple(range(10))
    for name in "abc":
        decode(state, request(name, *head, rest=20))
    state.apply(ev.EngineStatus(1.0, "d", 3, 0, reported))
    worker = state.snapshot(1.0).workers["d"]
    assert worker.foreign_kv_tokens == foreign
    assert worker.free_kv_tokens == 1000 - max(220, reported)


def test_only_hits_on_blocks_in_use_need_no_memory() -> None:
    state, asked = cluster(), request("q", *range(10))
    state.apply(ev.KvBatch(0.0, "d", "e", 0, (Stored(tuple(range(8))),)))
    hits = state.snapshot(0.0).hits
    assert (hits.tokens(asked), hits.tokens_in_use(asked)) == ({"d": 128}, {})
    decode(state, request("a", *range(5), 77))
    hits = state.snapshot(0.0).hits
    assert (hits.tokens(asked), hits.tokens_in_use(asked)) == ({"d": 128}, {"d": 80})
    assert hits.tokens_in_use(asked, 80) == {"d": 80}
    assert hits.tokens_in_use(asked, 81) == {}
    assert hits.tokens_in_use(asked, 1000) == {}
    # b holds all blocks, but only 8 of them are cached: the others are still on their way
    decode(state, request("b", *range(10)))
    assert state.snapshot(0.0).hits.tokens_in_use(asked) == {"d": 128}


def test_blocks_are_those_of_the_requests_that_name_a_worker_in_any_history() -> None:
    seen = 0
    for seed in range(30):
        life = Life(random.Random(seed))
        d = Dispatcher(
            DispatchConfig(), prefill_policy("join_shortest_queue"), decode_policy("join_shortest_queue")
        )
        for event in life.start():
            d.handle(event)
        for _ in range(150):
            with contextlib.suppress(ev.StaleEvent, ValueError, PolicyError):
                life.saw(tuple(d.handle(life.next_event())))
        ledger = d.state._ledger
        for name, load in ledger.loads.items():
            mine = [r for r in ledger.live.values() if name in (r.prefill_worker, r.decode_worker)]
            chains = [r.request.block_hashes for r in mine]
            shared = sum(map(len, chains)) - len({block for chain in chains for block in chain})
            assert load.blocks.shared_tokens == BLOCK * shared
            seen += shared > 0
    assert seen > 10


def test_a_worker_that_comes_back_holds_the_blocks_of_the_requests_that_name_it() -> None:
    state, head = cluster(), tuple(range(10))
    for name in "ab":
        decode(state, request(name, *head))
    views = []
    for event in (
        ev.Tick(1.0),
        ev.EngineDown(1.0, "d"),
        ev.EngineUp(2.0, "d", Role.DECODE, "g", "n", 8, 1000),
    ):
        state.apply(event)
        views.append(state.snapshot(2.0).workers.get("d"))
    before, away, after = views
    assert (before is not None, away, after is not None) == (True, None, True)
    assert before is not None
    assert after is not None
    assert before.shared_kv_tokens == after.shared_kv_tokens == 160
    assert all(a <= b for a, b in pairwise([after.kv_tokens, before.kv_tokens]))
