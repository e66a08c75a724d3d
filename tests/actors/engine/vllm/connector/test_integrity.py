"""Checksums of lent KV: what is chosen, what is fetched, what differs."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.vllm.connector.integrity import SAMPLE, checksums, chosen, runs, share_of


def test_modes_have_shares() -> None:
    assert (share_of("off"), share_of("sampled"), share_of("full")) == (None, SAMPLE, 1)
    with pytest.raises(ValueError, match="off, sampled or full"):
        share_of("some")


@given(st.integers(0, 2**63 - 1), st.sets(st.integers(0, 10**6), min_size=1, max_size=300))
def test_what_is_chosen_depends_on_descriptor_and_lease_alone(generation: int, some: set[int]) -> None:
    """Lender and reader see the descriptors in different orders, and the reader may see fewer of them."""
    indices = np.array(sorted(some), dtype=np.int32)
    picked = set(indices[chosen(indices, generation, SAMPLE)].tolist())
    part = indices[::-2]
    assert set(part[chosen(part, generation, SAMPLE)].tolist()) == picked & set(part.tolist())
    assert chosen(indices, generation, 1).all()
    assert picked <= set(indices[chosen(indices, generation, SAMPLE // 4)].tolist())


def test_a_sample_is_about_its_share_and_another_lease_has_another() -> None:
    indices = np.arange(100_000, dtype=np.int32)
    one, other = (chosen(indices, generation, SAMPLE) for generation in (1_700_000_000, 1_700_000_001))
    # binomial: 6,250 +- 5 standard deviations of 76.5
    assert 5867 < one.sum() < 6633
    assert (one & other).sum() < one.sum() / 2


def test_checksums_are_those_of_the_memory() -> None:
    data = np.arange(100, dtype=np.uint8)
    blocks = np.array([(data.ctypes.data + 10 * i, 10, 0) for i in range(10)], dtype=np.uint64)
    expected = [zlib.crc32(data[10 * i : 10 * i + 10].tobytes()) for i in (7, 2)]
    assert checksums(blocks, np.array([7, 2])).tolist() == expected
    data[25] ^= 1
    assert checksums(blocks, np.array([7, 2])).tolist()[1] != expected[1]


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([5, 6, 7], [(0, 3)]),
        ([5, 6, 8, 9, 2], [(0, 2), (2, 2), (4, 1)]),
        ([3, 2, 1], [(0, 1), (1, 1), (2, 1)]),
    ],
)
def test_runs(indices: list[int], expected: list[tuple[int, int]]) -> None:
    assert runs(np.array(indices, dtype=np.int32)) == expected
