"""Shared heads."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads.prefixes import (
    Sharing,
    block_hashes,
    ideal_hit_share,
    mix,
    share_prefixes,
    zipf_weights,
)
from benchmarks.workloads.record import WorkloadError, WorkloadRequest

SEGMENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=5)


def contents(segments) -> list[tuple[int, ...]]:
    """The facts that each token depends on: all segments up to its own, and its place."""
    told = []
    for i, (_, tokens) in enumerate(segments):
        told += [tuple(content for content, _ in segments[: i + 1])] * tokens
    return told


@given(SEGMENTS, SEGMENTS, st.integers(1, 16))
def test_equal_hashes_are_equal_heads(one, two, block_tokens):
    first, second = block_hashes(one, block_tokens), block_hashes(two, block_tokens)
    told_one, told_two = contents(one), contents(two)
    assert len(first) == len(told_one) // block_tokens
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        last = (i + 1) * block_tokens - 1
        assert (a == b) == (told_one[last] == told_two[last])


def test_hashes_are_the_same_everywhere():
    assert mix(1, 2) == 9_051_166_021_124_781_305
    # block i of a one-segment prompt: the segment's hash and the place, in both of the function's forms
    assert block_hashes([(7, 3)], 1) == tuple(mix(mix(0, 7), i) for i in range(3))
    assert len(set(block_hashes([(7, 4_000)], 1))) == 4_000
    assert all(0 <= h < 1 << 63 for h in block_hashes([(7, 100)], 1))


def requests(count: int, prompt: int = 2_048) -> list[WorkloadRequest]:
    return [WorkloadRequest(f"r{i}", float(i), prompt, 10) for i in range(count)]


def heads(made, block: int = 0) -> list[int]:
    return [r.block_hashes[block] for r in made]


def test_p_share_is_the_share_of_requests_that_begin_with_a_shared_text():
    count = 4_000
    made = list(share_prefixes(requests(count), Sharing(0.7, groups=8, block_tokens=64), seed=1))
    # a head that only one request has is unshared; with 8 texts and 4,000 requests a shared one recurs
    common = [n for n in Counter(heads(made)).values() if n > 1]
    assert sum(common) / count == pytest.approx(0.7, abs=5 * math.sqrt(0.21 / count))
    assert len(common) == 8


def test_nothing_and_everything_shared():
    alone = list(share_prefixes(requests(200), Sharing(0.0), seed=1))
    assert len(set(heads(alone))) == 200
    same = list(share_prefixes(requests(200), Sharing(1.0, groups=1, covered=(1.0, 1.0)), seed=1))
    assert len({r.block_hashes for r in same}) == 1
    assert ideal_hit_share(same) == pytest.approx(199 / 200)


def test_more_sharing_changes_only_those_that_come_to_share():
    low = list(share_prefixes(requests(500), Sharing(0.3), seed=1))
    high = list(share_prefixes(requests(500), Sharing(0.6), seed=1))
    changed = sum(a != b for a, b in zip(low, high, strict=True))
    assert changed / 500 == pytest.approx(0.3, abs=0.11)


def test_the_shared_part_is_within_its_bounds():
    made = list(
        share_prefixes(requests(300, 6_400), Sharing(1.0, 1, covered=(0.25, 0.5), block_tokens=64), 3)
    )
    longest = max(made, key=lambda r: sum(h in made[0].block_hashes for h in r.block_hashes))
    for r in made:
        agree = sum(a == b for a, b in zip(r.block_hashes, longest.block_hashes, strict=True))
        assert agree >= 25 or r is longest  # a quarter of 100 blocks
        assert agree <= 50 or r is longest


def test_a_shared_part_of_fixed_length_is_that_long_or_all_of_a_shorter_prompt():
    sharing = Sharing(1.0, 1, block_tokens=64, covered_tokens=640)
    long = list(share_prefixes(requests(20, 6_400), sharing, 3))
    short = list(share_prefixes(requests(20, 320), sharing, 3))
    for a, b in itertools.pairwise(long):
        assert [x == y for x, y in zip(a.block_hashes, b.block_hashes, strict=True)] == [True] * 10 + [
            False
        ] * 90
    assert {r.block_hashes for r in short} == {long[0].block_hashes[:5]}


def test_the_ideal_hit_by_hand():
    def one(hashes: tuple[int, ...], prompt: int) -> WorkloadRequest:
        return WorkloadRequest("r", 0, prompt, 1, hashes, 10)

    # 30 + 25 + 40 tokens; the second finds block 1, the third 1 and 2; block 4 behind an unknown one does not count
    assert ideal_hit_share([one((1, 2, 4), 30), one((1, 3), 25), one((1, 2, 9, 4), 40)]) == 30 / 95
    assert ideal_hit_share([]) is None


def test_impossible_sharing_is_refused():
    for make in (
        lambda: Sharing(1.2),
        lambda: Sharing(0.5, covered=(0.9, 0.1)),
        lambda: Sharing(0.5, block_tokens=0),
        lambda: Sharing(0.5, covered_tokens=0),
    ):
        with pytest.raises(WorkloadError):
            make()
    with pytest.raises(WorkloadError):
        zipf_weights(0, 1.0)
    assert zipf_weights(2, 1.0).tolist() == pytest.approx([2 / 3, 1.0])
