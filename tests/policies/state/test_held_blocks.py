"""Tests that KV blocks that requests share are counted once, that copies which the engine makes are counted each,
whatever the order of events, and that hits on shared blocks count as KV in use.
"""

import contextlib
import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
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


@settings(deadline=None)
@given(CHAINS, st.randoms(), st.sampled_from(["all", "none", "some"]))
def test_shared_tokens_are_what_holdings_exceed_the_copies_by(
    chains: list[tuple[int, ...]], rng: random.Random, cached: str
) -> None:
    blocks, held = HeldBlocks(), []
    for i, chain in enumerate(chains):
        one = request(f"r{i}", *chain)
        hits = {"all": len(chain), "none": 0, "some": rng.randint(0, len(chain))}[cached]
        held.append((one, blocks.add(one, hits)))
        if rng.random() < 0.3:
            blocks.remove(*held.pop(rng.randrange(len(held))))
        if held and rng.random() < 0.3:
            at = rng.randrange(len(held))
            one, before = held[at]
            now = {"all": before, "none": before, "some": rng.randint(before, len(one.block_hashes))}[cached]
            blocks.share(one, before, now)
            held[at] = one, now
        holders = Counter(block for one, _ in held for block in one.block_hashes)
        assert blocks.holders == holders
        assert all(0 < further < holders[block] for block, further in blocks.copies.items())
        most = BLOCK * (holders.total() - len(holders))
        assert blocks.shared_tokens == most - BLOCK * blocks.copies.total()
        # who hits all that is held shares it, and who hits nothing has a copy of every block
        assert blocks.shared_tokens == {"all": most, "none": 0}.get(cached, blocks.shared_tokens)
        for asked in chains:
            head = next((n for n, block in enumerate(asked) if block not in holders), len(asked))
            assert blocks.blocks_held(request("q", *asked)) == head
    for one, hits in held:
        blocks.remove(one, hits)
    assert (blocks.shared_tokens, len(blocks.holders), len(blocks.copies)) == (0, 0, 0)


def test_a_copy_goes_with_the_request_that_made_it_and_the_last_one_stays() -> None:
    # tokens in memory of one block: a and b pulled it at once, c hit it when it was cached
    blocks = HeldBlocks()
    a, b, c = (request(name, 1) for name in "abc")
    hits = {one.attempt_id: blocks.add(one, n) for one, n in ((a, 1), (b, 0), (c, 1))}
    assert hits == {"a": 0, "b": 0, "c": 1}

    def in_memory() -> int:
        return BLOCK * blocks.holders.total() - blocks.shared_tokens

    assert in_memory() == 2 * BLOCK
    blocks.remove(a, 0)
    assert in_memory() == BLOCK
    blocks.remove(b, 0)
    assert in_memory() == BLOCK
    blocks.remove(c, 1)
    assert in_memory() == 0


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


HEAD = tuple(range(10))
"""A system prompt of 160 tokens."""


def stored(state: ClusterState, worker: str, *hashes: int, seq: int = 0) -> None:
    state.apply(ev.KvBatch(0.0, worker, "e", seq, (Stored(hashes),)))


def used(state: ClusterState, worker: str) -> tuple[int, int, int]:
    """Returns a worker's KV tokens to read, those of them that are shared, and those in memory."""
    view = state.snapshot(0.0).workers[worker]
    return view.kv_tokens, view.shared_kv_tokens, view.kv_tokens_in_use


def three(state: ClusterState) -> None:
    """Sends a, b and c to d, which have the system prompt in common and 20 more tokens each. Their KV moves at once."""
    for name in "abc":
        decode(state, request(name, *HEAD, rest=20))


def test_requests_that_pull_one_system_prompt_at_once_have_a_copy_each() -> None:
    state = cluster()
    three(state)
    assert used(state, "d") == (540, 0, 540)
    for name in "abc":
        state.apply(ev.Admitted(1.0, name))
    stored(state, "d", *HEAD)
    assert used(state, "d") == (540, 0, 540)
    # the blocks are cached and in use: who comes now shares them
    decode(state, request("e", *HEAD, rest=20))
    assert used(state, "d") == (720, 160, 560)
    for name, left in (("a", 380), ("b", 200), ("c", 180), ("e", 0)):
        state.apply(ev.Closed(2.0, name, "finished"))
        assert used(state, "d")[2] == left


def test_requests_that_come_when_the_system_prompt_is_cached_share_it() -> None:
    # the first pulls it; later ones find 160 tokens in use: 3 * (160 + 20) to read, 160 + 3 * 20 in memory
    state = cluster()
    decode(state, request("a", *HEAD, rest=20))
    stored(state, "d", *HEAD)
    for name in "bc":
        decode(state, request(name, *HEAD, rest=20))
    assert used(state, "d") == (540, 320, 220)
    state.apply(ev.Closed(2.0, "a", "finished"))
    assert used(state, "d")[2] == 200
    for name in "bc":
        state.apply(ev.Closed(2.0, name, "finished"))
    assert used(state, "d") == (0, 0, 0)


def test_a_hit_on_idle_blocks_is_charged_to_the_first_and_shared_by_the_next() -> None:
    state = cluster()
    stored(state, "d", *HEAD)
    three(state)
    assert used(state, "d") == (540, 320, 220)


def test_a_prefill_worker_shares_what_its_engine_reports_as_cached() -> None:
    # three prompts wait on p; the first computes the head, the others hit it
    state = cluster()
    for name in "abc":
        state.apply(ev.Arrived(0.0, request(name, *HEAD, rest=20)))
        state.apply(ev.PrefillRouted(0.0, name, "p", colocated=False))
    assert used(state, "p") == (540, 0, 540)
    for name, cached, in_memory in (("a", 0, 540), ("b", 160, 380), ("c", 160, 220)):
        state.apply(ev.PrefillDone(0.0, name, 30.0, 1, cached))
        assert used(state, "p")[2] == in_memory
    for name in "abc":
        state.apply(ev.DecodeRouted(0.0, name, "d"))
        state.apply(ev.Admitted(1.0, name))
    assert used(state, "p") == (0, 0, 0)


def test_an_engine_without_a_prefix_cache_shares_nothing() -> None:
    state = cluster()
    for name in "abc":
        decode(state, request(name, *HEAD, rest=20))
        state.apply(ev.Admitted(1.0, name))
    assert used(state, "d") == (540, 0, 540)


def test_adopted_requests_share_what_the_snapshot_of_the_cache_names() -> None:
    state = cluster()
    for name in "abc":
        one = request(name, *HEAD, rest=20)
        state.apply(ev.Adopted(0.0, one, "decoding", None, "d", 0, 0.0, 0))
    assert used(state, "d") == (540, 0, 540)
    state.apply(ev.KvSnapshot(0.0, "d", "e", 7, (Stored(HEAD),)))
    assert used(state, "d") == (540, 320, 220)
    assert state.take_freed_workers() == {"d"}


@pytest.mark.parametrize(
    ("reported", "foreign"),
    # 220 tokens are ours: the rest of the report is another's, or copies that the engine keeps of one block
    [(0, 0), (220, 0), (300, 80), (540, 320)],
)
def test_what_a_report_shows_beyond_what_is_ours_is_foreign(reported: int, foreign: int) -> None:
    state = cluster()
    stored(state, "d", *HEAD)
    three(state)
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
    # b is to hold all blocks, but only 8 of them are cached: the others are on their way
    decode(state, request("b", *range(10)))
    assert state.snapshot(0.0).hits.tokens_in_use(asked) == {"d": 128}


def test_blocks_are_those_of_the_requests_that_name_a_worker_in_any_history() -> None:
    sharing = copying = 0
    for seed in range(120):
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
            holders = Counter(block for r in mine for block in r.request.block_hashes)
            copies = load.blocks.copies
            assert load.blocks.holders == holders
            assert all(0 < further < holders[block] for block, further in copies.items())
            shared = holders.total() - len(holders) - copies.total()
            assert load.blocks.shared_tokens == BLOCK * shared
            sharing += shared > 0
            copying += copies.total() > 0
    assert min(sharing, copying) > 5


def test_a_worker_that_comes_back_holds_the_blocks_of_the_requests_that_name_it() -> None:
    state = cluster()
    stored(state, "d", *HEAD)
    for name in "ba":
        decode(state, request(name, *HEAD))
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
