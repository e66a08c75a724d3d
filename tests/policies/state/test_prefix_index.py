"""Tests that the prefix index finds the hits of a naive replay of its feeds, and of gaps, replay, snapshots, dropped
content and bounds.
"""

import gc
import random
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.engine_model.blocks import Change, Cleared, Removed, Stored
from policies.state import events as ev
from policies.state.prefix_index import (
    BLOCK_BYTES,
    HELD_BACK_SHARE,
    HELD_BYTES,
    MAX_HELD_BACK,
    SWEEP_BLOCKS,
    IndexMemory,
    PrefixIndex,
    Wanted,
    bytes_of,
)
from policies.state.reducer import ClusterState
from policies.state.views import Role

# Three prompts that share a head: 1 2 3 4 5, 1 2 30 40, 7 8
PARENT = {1: None, 2: 1, 3: 2, 4: 3, 5: 4, 30: 2, 40: 30, 7: None, 8: 7}
CHAINS = [(1, 2, 3, 4, 5), (1, 2, 30, 40), (7, 8)]


def head(held: set[int], chain: tuple[int, ...]) -> int:
    return next((i for i, block in enumerate(chain) if block not in held), len(chain))


def fed(*batches: tuple[Change, ...], worker: str = "w") -> PrefixIndex:
    index = PrefixIndex()
    for seq, changes in enumerate(batches):
        index.apply(worker, "e", seq, changes)
    return index


def test_hits_are_the_longest_head_that_a_worker_holds() -> None:
    index = fed((Stored((1, 2, 3)),), worker="a")
    index.apply("b", "e", 0, (Stored((1, 2)), Stored((30,), parent=2)))
    index.apply("c", "e", 0, (Stored((7, 8)),))
    assert index.lookup((1, 2, 3, 4, 5)) == {"a": 3, "b": 2}
    assert index.lookup((1, 2, 30, 40)) == {"a": 2, "b": 3}
    assert index.lookup((9,)) == {}
    assert index.lookup(()) == {}


def test_an_evicted_head_ends_the_hit_though_the_tail_is_still_held() -> None:
    index = fed((Stored((1, 2, 3, 4, 5)),), (Removed((2,)),))
    assert index.lookup((1, 2, 3, 4, 5)) == {"w": 1}
    index.apply("w", "e", 2, (Stored((2,), parent=1),))
    assert index.lookup((1, 2, 3, 4, 5)) == {"w": 5}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "clear", "drop", "restart"]),
        st.sampled_from("abcd"),
        st.integers(0, 2),
        st.integers(0, 4),
        st.integers(1, 5),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_lookups_equal_a_naive_replay_whatever_is_evicted_or_dropped(steps) -> None:  # type: ignore[no-untyped-def]
    index, held, seqs, epochs = PrefixIndex(), {}, {}, dict.fromkeys("abcd", 0)  # type: ignore[var-annotated]
    for what, w, which, first, count in steps:
        blocks = CHAINS[which][first : first + count]
        if what == "drop":
            index.drop(w)
            held.pop(w, None)
            seqs[w], epochs[w] = 0, epochs[w] + 1
            continue
        if what == "restart":
            held.pop(w, None)
            seqs[w], epochs[w] = 0, epochs[w] + 1
        change: Change = Cleared()
        if what in ("store", "restart"):
            change = Stored(blocks, PARENT[blocks[0]] if blocks else None)
            held.setdefault(w, set()).update(blocks)
        elif what == "remove":
            change = Removed(blocks)
            held.get(w, set()).difference_update(blocks)
        else:
            held.get(w, set()).clear()
        index.apply(w, str(epochs[w]), seqs.get(w, 0), (change,))
        seqs[w] = seqs.get(w, 0) + 1
        for chain in CHAINS:
            expected = {name: head(blocks_, chain) for name, blocks_ in held.items() if head(blocks_, chain)}
            assert index.lookup(chain) == expected
    for w in "abcd":
        index.drop(w)
    for _ in range(30):  # removes dropped entries
        index.apply("z", "0", 0, ())
    assert index.blocks == 0


def test_a_batch_that_comes_twice_changes_nothing() -> None:
    index = fed((Stored((1, 2)),), (Removed((2,)),))
    index.apply("w", "e", 0, (Stored((1, 2)),))
    assert index.lookup((1, 2)) == {"w": 1}


def test_a_gap_holds_later_batches_back_until_the_missing_ones_are_replayed() -> None:
    index = fed((Stored((1,)),))
    index.apply("w", "e", 3, (Stored((4,), parent=3),))
    index.apply("w", "e", 2, (Stored((3,), parent=2),))
    assert index.lookup((1, 2, 3, 4)) == {"w": 1}
    assert index.wanted == {"w": Wanted("e", 1, 1)}
    index.apply("w", "e", 1, (Stored((2,), parent=1),))
    assert (index.lookup((1, 2, 3, 4)), index.wanted) == ({"w": 4}, {})


def test_a_feed_that_starts_in_the_middle_wants_its_beginning() -> None:
    index = PrefixIndex()
    index.apply("w", "e", 5, (Stored((1,)),))
    assert (index.lookup((1,)), index.wanted) == ({}, {"w": Wanted("e", 0, 4)})


def test_a_gap_too_long_drops_the_worker_and_wants_a_snapshot_that_heals_it() -> None:
    index = fed((Stored((1, 2)),))
    for seq in range(2, 3 + MAX_HELD_BACK):
        index.apply("w", "e", seq, (Removed((2,)),) if seq % 2 else (Stored((2,), parent=1),))
    assert index.lookup((1,)) == {}
    assert index.wanted == {"w": Wanted("e", None, None)}
    last = 2 + MAX_HELD_BACK
    index.restore("w", "e", last, [Stored((1, 2, 3))])
    assert index.wanted == {}
    # batch number `last`, which was held back, stored block 2 again
    assert index.lookup((1, 2, 3)) == {"w": 3}
    index.apply("w", "e", last + 1, (Removed((3,)),))
    assert index.lookup((1, 2, 3)) == {"w": 2}


def test_a_new_epoch_starts_empty_and_late_batches_of_the_old_one_do_not_count() -> None:
    index = fed((Stored((1, 2)),))
    index.apply("w", "next", 0, (Stored((7,)),))
    assert (index.lookup((1, 2)), index.lookup((7,))) == ({}, {"w": 1})


def test_a_dropped_worker_is_out_at_once_and_its_bit_is_reused_only_when_swept() -> None:
    index = fed((Stored(tuple(range(1, 2001))),))
    index.drop("w")
    assert index.lookup((1, 2)) == {}
    index.apply("v", "e", 0, (Stored((1,)),))
    assert index.lookup((1, 2)) == {"v": 1}
    for seq in range(1, 20):
        index.apply("v", "e", seq, ())
    assert index.blocks == 1
    index.apply("u", "e", 0, (Stored((2,), parent=1),))
    assert index.lookup((1, 2)) == {"v": 1}


def room_for(blocks: int, held: int = 0) -> IndexMemory:
    """Returns the memory of a number of blocks of one worker each, and of further workers' entries for them."""
    content_bytes = blocks * (BLOCK_BYTES + HELD_BYTES) + held * HELD_BYTES
    # an eighth is for what is held back
    return IndexMemory(-(-content_bytes * HELD_BACK_SHARE // (HELD_BACK_SHARE - 1)))


def test_blocks_beyond_the_bytes_are_refused_and_what_the_index_says_is_true() -> None:
    index = PrefixIndex(room_for(3, held=2))
    index.apply("a", "e", 0, (Stored((1, 2, 3, 4, 5)),))
    assert (index.blocks, index.refused) == (3, 2)
    # of another worker two entries fit, of a third none
    index.apply("b", "e", 0, (Stored((1, 2, 3)),))
    index.apply("c", "e", 0, (Stored((1,)),))
    assert (index.blocks, index.refused) == (3, 4)
    assert index.lookup((1, 2, 3, 4, 5)) == {"a": 3, "b": 2}
    # what is evicted makes room, and a repetition needs none
    index.apply("a", "e", 1, (Removed((3,)), Stored((1, 2)), Stored((7,))))
    assert (index.refused, index.lookup((7,))) == (4, {"a": 1})
    assert index.memory.taken_bytes <= index.memory.max_bytes


def test_the_indexes_of_all_groups_share_one_bound() -> None:
    memory = room_for(3)
    one, other = PrefixIndex(memory), PrefixIndex(memory)
    one.apply("a", "e", 0, (Stored((1, 2)),))
    other.apply("b", "e", 0, (Stored((1, 2)),))
    assert (one.blocks, other.blocks, other.refused) == (2, 1, 1)
    one.drop("a")
    one.sweep()
    other.apply("b", "e", 1, (Stored((2, 3), parent=1),))
    assert (one.blocks, other.blocks) == (0, 3)


def test_a_gap_of_too_many_bytes_is_given_up_before_it_has_too_many_batches() -> None:
    large = (Stored(tuple(range(10, 1010))),)
    index = PrefixIndex(IndexMemory(HELD_BACK_SHARE * 4 * bytes_of(large)))
    index.apply("w", "e", 0, (Stored((1,)),))
    for seq in (2, 3, 4):
        index.apply("w", "e", seq, large)
    assert index.wanted == {"w": Wanted("e", 1, 1)}
    for seq in (5, 6, 7):
        index.apply("w", "e", seq, large)
        assert index.memory.held_back_bytes <= index.memory.held_back_max_bytes
    assert (index.lookup((1,)), index.wanted) == ({}, {"w": Wanted("e", None, None)})
    # another worker's gap finds the room taken: it wants a snapshot at once, and a batch in order needs no room
    index.apply("v", "e", 1, large)
    index.apply("u", "e", 0, (Stored((1,)),))
    assert index.wanted["v"] == Wanted("e", None, None)
    assert index.lookup((1,)) == {"u": 1}
    index.restore("w", "e", 5, [Stored((1, 2))])
    assert (set(index.wanted), index.memory.held_back_bytes) == ({"v"}, 0)
    assert index.lookup((1, 2)) == {"u": 1, "w": 2}


@pytest.mark.parametrize("seed", range(5))
def test_bytes_are_those_of_what_is_there_whatever_happens(seed: int) -> None:
    rng, memory = random.Random(seed), IndexMemory(40_000)
    indexes = [PrefixIndex(memory), PrefixIndex(memory)]
    seqs = dict.fromkeys("abc", 0)
    for _ in range(400):
        index, worker = rng.choice(indexes), rng.choice("abc")
        blocks = tuple(rng.randrange(200) for _ in range(rng.randrange(6)))
        change = rng.choice((Stored(blocks, rng.choice((None, 5))), Removed(blocks), Cleared()))
        match rng.randrange(8):
            case 0:
                index.drop(worker)
            case 1:
                index.restore(worker, "e", seqs[worker], [Stored(blocks)])
            case 2:
                index.sweep()
            case _:
                seqs[worker] += rng.choice((1, 1, 1, 2))
                index.apply(worker, "e", seqs[worker] - 1, (change,) * rng.choice((1, 1, 20)))
        assert memory.held_back_bytes <= memory.held_back_max_bytes
    for index in indexes:
        tables = [*((feed.held, feed.missing) for feed in index._feeds.values())]
        entries = sum(len(held) + len(missing) for held, missing in tables)
        assert index._entries == entries + sum(len(held) for _, held in index._dead)
    assert memory.content_bytes == sum(index.memory_bytes() for index in indexes)
    for index in indexes:
        for worker in "abc":
            index.drop(worker)
        while index.blocks:
            index.sweep()
    assert memory.taken_bytes == 0


def own(blocks: range) -> tuple[int, ...]:
    """Returns hashes as they come from the wire: objects of this message alone."""
    return tuple(2**63 + block for block in blocks)


def of_long_chains(index: PrefixIndex) -> None:
    index.apply("w", "e", 0, (Stored(own(range(20_000))),))


def of_many_workers(index: PrefixIndex) -> None:
    for number in range(64):
        index.apply(f"w{number}", "e", 0, (Stored(own(range(400))),))


def of_single_blocks(index: PrefixIndex) -> None:
    for seq in range(10_000):
        parent = own(range(seq - 1, seq))[0] if seq else None
        index.apply("w", "e", seq, (Stored(own(range(seq, seq + 1)), parent),))


def without_parents(index: PrefixIndex) -> None:
    for seq in range(5000):
        index.apply("w", "e", seq, (Stored(own(range(seq, seq + 1)), own(range(-seq - 1, -seq))[0]),))


def held_back(index: PrefixIndex) -> None:
    for seq in range(1, 500):
        index.apply("w", "e", seq, (Stored(own(range(20)), 2**63 + seq), Removed(own(range(5)))))


@pytest.mark.parametrize(
    "fill", [of_long_chains, of_many_workers, of_single_blocks, without_parents, held_back]
)
def test_counted_bytes_are_no_fewer_than_those_that_python_takes(fill: Callable[[PrefixIndex], None]) -> None:
    index = PrefixIndex()
    gc.collect()
    tracemalloc.start()
    try:
        fill(index)
        gc.collect()
        measured_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert measured_bytes <= index.memory.taken_bytes <= 2.5 * measured_bytes


@pytest.mark.parametrize("seed", range(3))
def test_a_long_chain_over_many_workers(seed: int) -> None:
    rng, index = random.Random(seed), PrefixIndex()
    chain = tuple(rng.getrandbits(63) for _ in range(700))
    held = {f"w{i}": rng.choice([0, 1, 350, 699, 700, rng.randrange(700)]) for i in range(60)}
    for w, n in held.items():
        index.apply(w, "e", 0, (Stored(chain[:n]),))
    assert index.lookup(chain) == {w: n for w, n in held.items() if n}


def test_the_blocks_of_one_worker_are_those_of_the_lookup() -> None:
    index = fed((Stored((1, 2, 3, 4, 5)),), (Removed((2,)),), worker="gap")
    index.apply("whole", "e", 0, (Stored((1, 2, 3)),))
    for chain in (*CHAINS, (), (9,)):
        found = index.lookup(chain)
        for worker in ("gap", "whole", "nobody"):
            assert index.blocks_held(worker, chain) == found.get(worker, 0)
    assert index.blocks_held("whole", (1, 2, 3), 2) == 2


def test_ticks_sweep_a_group_that_has_gone_and_give_its_memory_back() -> None:
    state = ClusterState()
    state.apply(ev.EngineUp(0.0, "w", Role.DECODE, "g", "n", 8, 1000))
    state.apply(ev.KvBatch(0.0, "w", "e", 0, (Stored(tuple(range(1, 2001))),)))
    state.apply(ev.EngineDown(1.0, "w"))
    index = state.prefix_index("g")
    assert index is not None
    version, least = index.version, PrefixIndex().memory_bytes()
    assert index.blocks == 2000
    for _ in range(-(-2000 // SWEEP_BLOCKS)):
        state.apply(ev.Tick(1.0))
    assert (index.blocks, index.memory_bytes()) == (0, least)
    # answers that were kept for this version are valid still
    assert state.prefix_index("g") is index
    assert index.version == version
