"""Checksums of lent KV: what is chosen, what is fetched, what differs."""

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.vllm.connector.integrity import SAMPLE, Fetch, SumsAt, checksums, chosen, runs, share_of
from actors.engine.vllm.connector.lease_table import GenerationProbe
from actors.engine.vllm.connector.read_check import ReadChecks


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


# ------------------------------------------------------------------------------------------------ a lender that goes


class Nixl:
    """A NIXL agent that moves nothing, knows what it holds, and raises an error in the calls of `refuses`."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.refuses: set[str] = set()

    def get_reg_descs(self, region: Any, kind: str) -> Any:
        return region

    get_xfer_descs = get_reg_descs

    def register_memory(self, region: Any, backends: list[str]) -> str:
        self.held.append("memory")
        return "memory"

    def deregister_memory(self, registration: str) -> None:
        self.held.remove(registration)

    def initialize_xfer(self, *_: Any) -> str:
        self._may("initialize_xfer")
        self.held.append("handle")
        return "handle"

    def transfer(self, handle: str) -> str:
        self._may("transfer")
        return "PROC"

    def check_xfer_state(self, handle: str) -> str:
        self._may("check_xfer_state")
        return "PROC"

    def release_xfer_handle(self, handle: str) -> None:
        self._may("release_xfer_handle")
        self.held.remove(handle)

    def _may(self, call: str) -> None:
        if call in self.refuses:
            raise RuntimeError(call)


def fetch(nixl: Nixl) -> Fetch:
    return Fetch(nixl, ["UCX"], "lender", SumsAt(4096, 100, 6400, 1), np.array([3, 4, 9]))


@pytest.mark.parametrize("call", ["initialize_xfer", "transfer"])
def test_a_fetch_that_does_not_begin_leaves_no_memory_registered(call: str) -> None:
    nixl = Nixl()
    nixl.refuses = {call}
    with pytest.raises(RuntimeError, match=call):
        fetch(nixl)
    assert nixl.held == []


def test_a_fetch_whose_lender_dies_leaves_no_memory_registered() -> None:
    nixl = Nixl()
    one = fetch(nixl)
    assert (one.poll(), one.close(), nixl.held) == (None, False, ["memory", "handle"])
    nixl.refuses = {"check_xfer_state"}
    with pytest.raises(RuntimeError, match="check_xfer_state"):
        one.poll()
    assert one.close()
    assert nixl.held == []


def test_a_fetch_that_nixl_does_not_release_keeps_its_memory_until_it_does() -> None:
    """A read that was given up, and whose lender dies then: NIXL may still write until it has released the read."""
    nixl = Nixl()
    checks = ReadChecks(nixl, ["UCX"], GenerationProbe(nixl, ["UCX"]))
    nixl.held.clear()
    checks._late.append(fetch(nixl))
    nixl.refuses = {"check_xfer_state", "release_xfer_handle"}
    for _ in range(3):
        checks.poll(0.0)
        assert checks.overdue
        assert nixl.held == ["memory", "handle"]
    nixl.refuses = set()
    checks.poll(0.0)
    assert not checks.overdue
    assert nixl.held == []
