"""A read in chunks over two real NIXL agents: posted by slices, never cancelled, ended by an abort or an error."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")
pytest.importorskip("nixl._api", reason="NIXL is not installed; `make setup` installs it")

from actors.engine.vllm.connector.chunked_read import (
    ChunkedRead,
    ReadTerms,
    Side,
    cut,
)
from actors.engine.vllm.connector.lease_table import Source
from actors.flow.chunks import MOST_CHUNKS
from tests.actors.engine.vllm.connector.pair import BLOCKS, DESCRIPTORS, Pair, until


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize(
    ("lengths", "chunk_bytes", "ends"),
    [
        # 8 x 100 bytes by 250: 4 chunks of 200
        ([100] * 8, 250, [2, 4, 6, 8]),
        # a descriptor that is longer than a chunk stays whole
        ([1000, 1000], 10, [1, 2]),
        ([100] * 3, 1e9, [3]),
        ([100], 1, [1]),
        # 600 bytes by 300: the second chunk begins where half of the bytes are reached
        ([100, 100, 100, 300], 300, [3, 4]),
    ],
)
def test_chunks_are_slices_of_about_the_same_size(
    lengths: list[int], chunk_bytes: float, ends: list[int]
) -> None:
    assert cut(np.array(lengths, dtype=np.int64), chunk_bytes) == ends


def test_every_descriptor_is_in_one_chunk_and_chunks_are_bounded_in_number() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        lengths = random.integers(1, 5000, random.integers(1, 3000))
        ends = cut(lengths, float(random.integers(1, 100_000)))
        assert ends[-1] == len(lengths)
        assert sorted(set(ends)) == ends
        assert len(ends) <= MOST_CHUNKS


def done(read: ChunkedRead) -> list[Any]:
    """Polls until nothing is in flight."""
    ended: list[Any] = []

    def idle() -> bool:
        ended.extend(read.poll(time.monotonic()))
        return not read.in_flight

    until(idle)
    return ended


def test_chunks_move_their_slices_and_no_more(pair: Pair) -> None:
    pair.forget()
    read = pair.read("r")
    sizes = read.divide(read.bytes / 8)
    assert sizes == [BLOCKS * pair.block_bytes] * 8
    assert read.state == "PROC"
    read.post(0, 1, time.monotonic())
    read.post(5, 2, time.monotonic())
    ended = done(read)
    assert sorted((post.first, post.count, post.bytes) for post in ended) == [
        (0, 1, sizes[0]),
        (5, 2, sizes[5] + sizes[6]),
    ]
    there = np.r_[0:BLOCKS, 5 * BLOCKS : 7 * BLOCKS]
    assert pair.same(there)
    assert not pair.copy.reshape(DESCRIPTORS, -1)[np.setdiff1d(np.arange(DESCRIPTORS), there)].any()
    assert (read.chunks_done, read.whole, read.over, read.state) == (3, False, False, "PROC")
    read.post(1, 4, time.monotonic())
    read.post(7, 1, time.monotonic())
    done(read)
    assert (read.whole, read.over) == (True, True)
    read.end(time.monotonic())
    assert pair.same()
    telemetry = read.telemetry()
    assert telemetry is not None
    assert (telemetry.totalBytes, read.state) == (read.bytes, "DONE")
    assert telemetry.descCount >= 4
    read.release()


def test_an_abort_in_mid_chunk_waits_for_it_and_posts_nothing_more(pair: Pair) -> None:
    pair.forget()
    read = pair.read("aborted")
    read.divide(read.bytes / 4)
    read.post(0, 1, time.monotonic())
    read.submitted_s = time.monotonic()
    read.abort()
    assert not read.over
    assert read.post(1, 1, time.monotonic()) is None
    with pytest.raises(RuntimeError, match="still to come"):
        read.release()
    assert len(done(read)) == 1
    assert read.over
    read.end(time.monotonic())
    read.release()
    quarter = np.arange(DESCRIPTORS // 4)
    assert pair.same(quarter)
    assert not pair.copy.reshape(DESCRIPTORS, -1)[DESCRIPTORS // 4 :].any()


def test_a_read_that_was_never_submitted_can_be_released(pair: Pair) -> None:
    """vLLM releases what it has made when the rest of a request's read cannot be made."""
    read = pair.read("unsubmitted")
    assert read.held_s(time.monotonic()) == 0.0
    pair.borrower.release_xfer_handle(read)
    read = pair.read("submitted")
    pair.borrower.submit = lambda given: setattr(given, "submitted_s", time.monotonic())
    pair.borrower.transfer(read)
    with pytest.raises(RuntimeError, match="still to come"):
        pair.borrower.release_xfer_handle(read)


def test_busy_seconds_leave_holds_out_and_count_overlaps_once() -> None:
    """Two chunks in flight from 1 to 3 and from 2 to 4, a hold until 10, the last from 10 to 11."""
    nixl = Scripted()
    read = scripted(nixl, 3)
    read.submitted_s = 0.0
    read.post(0, 1, 1.0)
    read.poll(2.0)
    read.post(1, 1, 2.0)
    nixl.states["h0"] = "DONE"
    read.poll(3.0)
    nixl.states["h1"] = "DONE"
    read.poll(4.0)
    assert read.poll(7.0) == []
    read.post(2, 1, 10.0)
    nixl.states["h2"] = "DONE"
    read.poll(11.0)
    assert read.busy_s == pytest.approx(4.0)
    read.end(11.5)
    assert read.held_s(99.0) == pytest.approx(7.5)


class Scripted:
    """An agent whose transfers end when the test says so."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.released: list[str] = []
        self.refuses_release = False

    def make_prepped_xfer(self, *args: Any) -> str:
        return f"h{len(self.states)}"

    def transfer(self, handle: str) -> str:
        self.states[handle] = "PROC"
        return "PROC"

    def check_xfer_state(self, handle: str) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: str) -> Any:
        return SimpleNamespace(postDuration=1.0, xferDuration=1.0, totalBytes=10, descCount=1)

    def release_xfer_handle(self, handle: str) -> None:
        if self.refuses_release:
            raise RuntimeError("still writing")
        self.released.append(handle)


def scripted(nixl: Scripted, count: int) -> ChunkedRead:
    blocks = np.array([(i * 10, 10, 0) for i in range(count)], dtype=np.uint64)
    indices = np.arange(count, dtype=np.int32)
    side = Side(None, indices, indices, blocks, (count, 10 * count))
    read = ChunkedRead(nixl, ReadTerms(request_id="r", source=Source("there", (0, 0))), side, side)
    read.divide(10)
    return read


def test_after_an_error_the_read_ends_behind_the_others_in_flight() -> None:
    nixl = Scripted()
    read = scripted(nixl, 4)
    read.post(0, 1, 0.0)
    read.post(1, 1, 0.0)
    nixl.states["h0"] = "ERR"
    assert [post.failed for post in read.poll(1.0)] == [True]
    assert read.post(2, 1, 1.0) is None
    assert not read.over
    nixl.states["h1"] = "DONE"
    assert [post.failed for post in read.poll(2.0)] == [False]
    assert read.over
    read.end(2.0)
    assert read.state == "ERR"
    nixl.refuses_release = True
    with pytest.raises(RuntimeError, match="still writing"):
        read.release()
    nixl.refuses_release = False
    read.release()
    assert sorted(nixl.released) == ["h0", "h1"]
