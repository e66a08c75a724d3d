"""Tests of the block pool: literal cases, and properties over random histories."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.engine_model.blocks import (
    Allocation,
    BlockError,
    BlockPool,
    Cleared,
    Removed,
    Stored,
    block_hashes,
)


def test_hashes_are_chained_and_stable() -> None:
    a = block_hashes(list(range(40)), 16)
    assert len(a) == 2  # a partial block has no hash
    assert a == block_hashes(list(range(32)), 16)
    # an earlier token changes all later hashes
    assert block_hashes([99, *range(1, 32)], 16)[1] != a[1]
    assert block_hashes(list(range(32)), 16, salt=1) != a
    # stable across processes and releases: the prefix index of another process compares them
    assert block_hashes([1, 2, 3, 4], 2) == (block_hashes([1, 2], 2)[0], block_hashes([1, 2, 3, 4], 2)[1])


def test_impossible_tokens_are_refused() -> None:
    with pytest.raises(OverflowError):
        block_hashes([1, -1], 2)


def test_hit_shares_blocks() -> None:
    pool = BlockPool(10, 16)
    first = pool.allocate((), 3)
    assert first is not None
    pool.commit(first, (11, 12))
    second = pool.allocate((11, 12, 13), 4)
    assert second is not None
    assert second.hits == 2
    assert pool.used == 5  # 2 shared + 1 + 2 private
    pool.release(first)
    assert pool.used == 4
    pool.release(second)
    assert (pool.used, pool.free, pool.cached) == (0, 10, 2)


def test_commit_of_known_blocks_gives_the_copy_up() -> None:
    pool = BlockPool(10, 16)
    a, b = pool.allocate((), 2), pool.allocate((), 2)
    assert a is not None
    assert b is not None
    pool.commit(a, (1, 2))
    pool.commit(b, (1, 2))
    assert pool.used == 2
    pool.release(a)
    pool.release(b)
    assert pool.free == 10


def test_least_recently_used_is_evicted_first_and_the_chain_from_its_end() -> None:
    pool = BlockPool(4, 16, record_changes=True)
    old, new = pool.allocate((), 2), pool.allocate((), 2)
    assert old is not None
    assert new is not None
    pool.commit(old, (1, 2))
    pool.commit(new, (3, 4))
    pool.release(old)
    pool.release(new)
    assert pool.hits((1, 2)) == 2
    one = pool.allocate((), 1)
    assert one is not None
    # block 2, the end of the older chain, was evicted first
    assert pool.hits((1, 2)) == 1
    assert pool.hits((3, 4)) == 2
    touched = pool.allocate((1,), 1)  # block 1 is used again ...
    assert touched is not None
    pool.release(touched)
    two = pool.allocate((), 2)  # ... so 4 and 3 are evicted before it
    assert two is not None
    assert pool.hits((1,)) == 1
    assert pool.hits((3,)) == 0
    assert pool.drain_changes() == [
        Stored((1, 2), None),
        Stored((3, 4), None),
        Removed((2,)),
        Removed((4, 3)),
    ]


def test_stored_events_name_their_parent_and_skip_what_was_there() -> None:
    pool = BlockPool(10, 16, record_changes=True)
    a = pool.allocate((), 1)
    assert a is not None
    pool.commit(a, (1,))
    b = pool.allocate((1,), 3)
    assert b is not None
    pool.commit(b, (1, 2, 3))
    assert pool.drain_changes() == [Stored((1,), None), Stored((2, 3), 1)]
    assert pool.drain_changes() == []
    assert {*pool._refs, *pool._idle} == {1, 2, 3}


def test_clear_needs_an_unused_pool() -> None:
    pool = BlockPool(4, 16, record_changes=True)
    a = pool.allocate((), 1)
    assert a is not None
    pool.commit(a, (7,))
    assert not pool.clear()
    assert pool.hits((7,)) == 1
    pool.release(a)
    assert pool.clear()
    assert pool.hits((7,)) == 0
    assert pool.drain_changes()[-1] == Cleared()


def test_misuse_is_refused() -> None:
    pool = BlockPool(4, 16)
    a = pool.allocate((), 1)
    assert a is not None
    with pytest.raises(BlockError):
        pool.commit(a, (1, 2))
    pool.release(a)
    with pytest.raises(BlockError):
        pool.release(a)
    with pytest.raises(BlockError):
        pool.grow(a, 1)
    assert pool.free == 4


def test_refused_allocation_changes_nothing() -> None:
    pool = BlockPool(3, 16)
    a = pool.allocate((), 2)
    assert a is not None
    pool.commit(a, (1, 2))
    pool.release(a)
    assert pool.allocate((1, 2), 4) is None
    assert (pool.free, pool.cached) == (3, 2)
    # all three blocks are "free", but two of them are the hits themselves: 2 + 1 fit, 2 + 2 do not
    b = pool.allocate((1, 2), 3)
    assert b is not None
    assert pool.free == 0
    assert not pool.grow(b, 1)
    assert b.private == 1


OPS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "commit", "grow", "release"]), st.integers(0, 7), st.integers(0, 6)
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(OPS, st.integers(1, 24))
def test_conservation_under_any_history(ops: list[tuple[str, int, int]], total: int) -> None:
    """The pool's `used` is the number of blocks that live allocations hold, each shared block counted once."""
    pool = BlockPool(total, 4, record_changes=True)
    live: list[tuple[Allocation, tuple[int, ...]]] = []
    mirror: set[int] = set()
    for op, pick, size in ops:
        chain = tuple(100 * (pick % 3) + i for i in range(size))
        if op == "allocate":
            allocation = pool.allocate(chain[:-1], size + 1)
            if allocation is not None:
                live.append((allocation, chain))
        elif live and op == "commit":
            pool.commit(*live[pick % len(live)])
        elif live and op == "grow":
            pool.grow(live[pick % len(live)][0], size)
        elif live and op == "release":
            pool.release(live.pop(pick % len(live))[0])
        for event in pool.drain_changes():
            match event:
                case Stored(hashes, _):
                    assert not mirror & set(hashes)
                    mirror |= set(hashes)
                case Removed(hashes):
                    assert set(hashes) <= mirror
                    mirror -= set(hashes)
        shared = {block for allocation, _ in live for block in allocation.shared}
        assert pool.used == len(shared) + sum(allocation.private for allocation, _ in live)
        assert pool.used + pool.free == total
        assert pool.cached <= total - sum(allocation.private for allocation, _ in live)
        assert {*pool._refs, *pool._idle} == mirror
        assert shared <= mirror
    for allocation, _ in live:
        pool.release(allocation)
    assert pool.free == total
