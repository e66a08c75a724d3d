"""Segment queues against vLLM's free queue, under vLLM's own KV cache manager."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.vllm

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")

import torch  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from actors.engine.vllm import blocks as blocks_module  # noqa: E402
from actors.engine.vllm.blocks import (  # noqa: E402
    LOOKED_AT,
    FlowKVQueue,
    SegmentedManager,
    SegmentQueue,
    Segments,
    allocate_by,
    best_fit,
    runs_of,
)

BLOCK = 4
ALLOCATORS = ("stock", "segments", "flowkv")
init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK, sha256)


class Pool:
    """A KV cache manager and the requests that hold its blocks."""

    def __init__(self, allocator: str, blocks: int, caching: bool) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)], hash_block_size=BLOCK)
        self.manager = KVCacheManager(
            cache,
            max_model_len=4096,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            enable_caching=caching,
        )
        allocate_by(allocator, self.manager)
        self.held: dict[str, Request] = {}
        self.hits = 0

    def admit(self, name: str, tokens: list[int]) -> bool:
        """Whether there was room for a prompt, which then counts as computed."""
        request = Request(name, tokens, SamplingParams(max_tokens=64), None, block_hasher=HASHER)
        cached, hit, _ = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, len(tokens) - hit, hit, cached) is None:
            return False
        request.num_computed_tokens = len(tokens)
        self.hits += hit
        self.held[name] = request
        return True

    def grow(self, name: str, token: int) -> bool:
        """Whether there was room for one more token of a request."""
        request = self.held[name]
        request.append_output_token_ids(token)
        if self.manager.allocate_slots(request, 1) is None:
            return False
        request.num_computed_tokens += 1
        return True

    def free(self, name: str) -> None:
        self.manager.free(self.held.pop(name))

    def blocks(self, name: str) -> list[int]:
        return list(self.manager.get_block_ids(name)[0])

    def free_ids(self) -> list[int]:
        return [block.block_id for block in self.manager.block_pool.free_block_queue.get_all_free_blocks()]

    def check(self) -> None:
        """Every block is free or held, a free one is held by nobody, and the count of the free ones is right."""
        pool = self.manager.block_pool
        free, held = self.free_ids(), {block for name in self.held for block in self.blocks(name)}
        assert len(free) == len(set(free)) == pool.get_num_free_blocks()
        assert set(free) | held == set(range(1, pool.num_gpu_blocks))
        assert not set(free) & held
        counts = [
            sum(block in self.blocks(name) for name in self.held) for block in range(1, pool.num_gpu_blocks)
        ]
        assert counts == [block.ref_cnt for block in pool.blocks[1:]], (
            "a block belongs to two by a shared prefix only"
        )
        if isinstance(pool.free_block_queue, FlowKVQueue):
            assert list(pool.free_block_queue._segments) == runs_of(sorted(free))


def prompt(family: int, length: int) -> list[int]:
    """Prompts of one family share all that both of them have."""
    return [family * 1000 + i for i in range(length)]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, 3), st.integers(1, 60)),
        st.tuples(st.just("grow"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 9), st.just(0)),
    ),
    max_size=60,
)


def apply(pool: Pool, operation: tuple[str, int, int], name: str) -> bool:
    what, number, length = operation
    if what == "admit":
        return pool.admit(name, prompt(number, length))
    names = list(pool.held)
    if not names:
        return True
    if what == "grow":
        return pool.grow(names[number % len(names)], number)
    pool.free(names[number % len(names)])
    return True


@pytest.mark.parametrize("allocator", ALLOCATORS[1:])
@given(operations=OPERATIONS, blocks=st.integers(5, 40))
@settings(max_examples=25, deadline=None)
def test_without_a_prefix_cache_all_queues_admit_the_same(
    allocator: str, operations: list[tuple[str, int, int]], blocks: int
) -> None:
    stock, ours = Pool("stock", blocks, False), Pool(allocator, blocks, False)
    for n, operation in enumerate(operations):
        assert apply(stock, operation, f"r{n}") == apply(ours, operation, f"r{n}")
        ours.check()
        sizes = {name: len(stock.blocks(name)) for name in stock.held}
        assert sizes == {name: len(ours.blocks(name)) for name in ours.held}
        assert len(stock.free_ids()) == len(ours.free_ids())


@pytest.mark.parametrize("allocator", ALLOCATORS)
@given(operations=OPERATIONS, blocks=st.integers(5, 40))
@settings(max_examples=25, deadline=None)
def test_with_a_prefix_cache_no_block_is_lost_or_given_twice(
    allocator: str, operations: list[tuple[str, int, int]], blocks: int
) -> None:
    pool = Pool(allocator, blocks, True)
    for n, operation in enumerate(operations):
        apply(pool, operation, f"r{n}")
        pool.check()
    for name in list(pool.held):
        pool.free(name)
    assert pool.manager.reset_prefix_cache()
    assert pool.admit("all", prompt(9, (blocks - 1) * BLOCK))


@given(operations=OPERATIONS, blocks=st.integers(5, 40))
@settings(max_examples=25, deadline=None)
def test_a_window_of_one_evicts_what_vllm_evicts(operations: list[tuple[str, int, int]], blocks: int) -> None:
    """Among the n oldest there is no choice but of their order, so prefix hits are those of vLLM's queue."""
    stock, ours = Pool("stock", blocks, True), Pool("stock", blocks, True)
    pool = ours.manager.block_pool
    pool.free_block_queue = SegmentQueue(pool.free_block_queue, pool.blocks, window=1)
    ours.manager.__class__ = SegmentedManager
    for n, operation in enumerate(operations):
        # growing takes a block at a time, of which the queue's order decides, so it may differ from here on
        if operation[0] == "grow":
            continue
        assert apply(stock, operation, f"r{n}") == apply(ours, operation, f"r{n}")
        assert {name: sorted(stock.blocks(name)) for name in stock.held} == {
            name: sorted(ours.blocks(name)) for name in ours.held
        }
        assert sorted(stock.free_ids()) == sorted(ours.free_ids())
        if operation[0] == "free":
            break
    ours.check()


def churned(allocator: str, caching: bool) -> Pool:
    """A pool of 400 blocks through which 400 requests of 10 to 30 blocks have gone, eight of them at a time."""
    pool, rng = Pool(allocator, 400, caching), random.Random(7)
    for n in range(400):
        if len(pool.held) == 8:
            pool.free(rng.choice(list(pool.held)))
        assert pool.admit(f"r{n}", [rng.randrange(1 << 30) for _ in range(rng.randint(10, 30) * BLOCK)])
        pool.grow(rng.choice(list(pool.held)), n)
    pool.check()
    return pool


def pieces_of(pool: Pool) -> float:
    names = list(pool.held)
    return sum(1 + sum(b != a + 1 for a, b in pairwise(ids)) for ids in map(pool.blocks, names)) / len(names)


@pytest.mark.parametrize("caching", [False, True])
def test_an_old_pool_gives_prompts_in_few_pieces(caching: bool) -> None:
    stock, segments, flowkv = (pieces_of(churned(allocator, caching)) for allocator in ALLOCATORS)
    assert stock > 12, "vLLM's order leaves next to no two blocks side by side"
    assert segments < 4
    assert flowkv < 4


def test_a_request_goes_on_behind_its_last_block() -> None:
    pool = Pool("segments", 40, False)
    for name in "abc":
        assert pool.admit(name, prompt(ord(name), 4 * BLOCK))
    pool.free("b")
    for n in range(2 * BLOCK):
        assert pool.grow("a", n)
    assert pool.blocks("a") == [1, 2, 3, 4, 5, 6]


def test_a_shared_prefix_is_kept_longer_than_what_is_older() -> None:
    """40 blocks: one family of 8 blocks is asked for again and again while others of 8 blocks pass through."""
    pool = Pool("segments", 40, True)
    for n in range(30):
        for family in (0, 100 + n):
            assert pool.admit(f"{n}-{family}", [family, *prompt(0, 8 * BLOCK)])
            pool.free(f"{n}-{family}")
    assert pool.hits == 29 * 8 * BLOCK


def test_the_end_whose_block_is_older_goes_first() -> None:
    assert best_fit(2, [5, 4, 3, 2, 1], None) == [4, 5]
    assert best_fit(2, [1, 2, 3, 4, 5], None) == [1, 2]


@pytest.mark.parametrize(
    ("n", "oldest", "after", "chosen"),
    [
        # the run that fits exactly
        (2, [7, 1, 2, 3, 10, 11], None, [10, 11]),
        # the longest whole, then the shortest that holds the rest
        (4, [7, 1, 2, 3, 10, 11], None, [1, 2, 3, 7]),
        (5, [7, 1, 2, 3, 10, 11], None, [1, 2, 3, 10, 11]),
        # behind the request's last block, then by best fit
        (2, [7, 1, 2, 3, 10, 11], 1, [2, 3]),
        (3, [7, 1, 2, 3, 10, 11], 9, [10, 11, 7]),
        # nothing is free behind it
        (2, [7, 1, 2, 3, 10, 11], 20, [10, 11]),
        (6, [7, 1, 2, 3, 10, 11], None, [1, 2, 3, 7, 10, 11]),
        # of equals the oldest
        (1, [20, 10, 30], None, [20]),
    ],
)
def test_best_fit_among_the_oldest(n: int, oldest: list[int], after: int | None, chosen: list[int]) -> None:
    assert best_fit(n, oldest, after) == chosen
    assert len(Segments(oldest).best_fit(n, after)) == n


def test_too_few_blocks_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 blocks asked for, 2 to choose from"):
        best_fit(3, [1, 2], None)
    queue = SegmentQueue(FreeKVCacheBlockQueue([]), [])
    with pytest.raises(ValueError, match="No free blocks"):
        queue.popleft()


def test_a_long_prompt_does_not_walk_through_the_whole_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 blocks look at 5,096 of 9,000 free ones, not at 8,000; 10 look at 80."""
    seen: list[int] = []
    best = blocks_module.best_fit

    def counted(n: int, oldest: list[int], after: int | None) -> list[int]:
        seen.append(len(oldest))
        return best(n, oldest, after)

    monkeypatch.setattr(blocks_module, "best_fit", counted)
    every = [KVCacheBlock(n) for n in range(9000)]
    queue = SegmentQueue(FreeKVCacheBlockQueue(every), every)
    assert len(queue.popleft_n(1000)) == 1000
    queue.popleft_n(10)
    assert seen == [1000 + LOOKED_AT, 80]


@given(st.lists(st.integers(0, 30), max_size=80), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_segments_are_the_maximal_runs(flips: list[int], n: int) -> None:
    free: set[int] = set()
    segments = Segments()
    for block in flips:
        if block in free:
            segments.take(block)
        else:
            segments.add(block)
        free ^= {block}
        assert list(segments) == runs_of(sorted(free))
        if len(free) >= n:
            for after in (None, block):
                chosen = segments.best_fit(n, after)
                assert len(set(chosen)) == n
                assert set(chosen) <= free
    with pytest.raises(KeyError, match="not free"):
        segments.take(99)


def test_flowkv_takes_the_head_of_the_shortest_segment_that_is_long_enough() -> None:
    segments = Segments([1, 2, 3, 4, 10, 11, 20])
    assert segments.best_fit(2, None) == [10, 11]
    assert segments.best_fit(3, None) == [1, 2, 3]
    assert segments.best_fit(5, None) == [1, 2, 3, 4, 20]
    assert segments.best_fit(3, 9) == [10, 11, 20]
    assert segments.best_fit(6, 9) == [10, 11, 1, 2, 3, 4]


def every_queue() -> Iterator[Any]:
    for allocator in ALLOCATORS:
        pool = Pool(allocator, 12, True).manager.block_pool
        yield pool, pool.free_block_queue


def test_all_queues_keep_the_order_of_blocks_that_come_back() -> None:
    """Blocks that are appended become the youngest, those that are prepended the oldest."""
    for pool, queue in every_queue():
        taken = queue.popleft_n(11)
        assert queue.num_free_blocks == 0
        queue.append_n(taken[3:5])
        queue.prepend_n(taken[:2])
        queue.append(taken[2])
        expected = [block.block_id for block in [*taken[:2], *taken[3:5], taken[2]]]
        assert [block.block_id for block in queue.get_all_free_blocks()] == expected
        queue.remove(taken[3])
        assert [block.block_id for block in queue.iter_blocks_after(taken[1])] == [expected[3], expected[4]]
        assert queue.num_free_blocks == 4
        assert pool.get_num_free_blocks() == 4
        with pytest.raises(RuntimeError, match="invalid block"):
            queue.remove(taken[3])


def test_an_unknown_allocator_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="give stock, segments or flowkv"):
        Pool("best", 12, True)
    with pytest.raises(ValueError, match="at least 1"):
        SegmentQueue(FreeKVCacheBlockQueue([]), [], window=0)
