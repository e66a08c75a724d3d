"""The reader's state machine: permits and chunks by hand, and every way in which reads go on without a permit."""

import dataclasses
from typing import cast

import pytest

from actors.flow.chunks import CHUNK_BYTES, MOST_CHUNKS, chunks_of
from actors.flow.reader import Finished, Post, Reader, ReaderConfig, Send
from actors.wire.messages import (
    AdvanceFlow,
    Beat,
    ChunkDone,
    FlowRefused,
    Permitted,
    SubmitFlow,
    Unscheduled,
    WithdrawFlow,
)
from policies.flow.arbiter import Arbiter
from policies.flow.base import Flow, Stage
from policies.flow.config import ArbiterConfig
from policies.flow.events import Done, Submitted
from policies.flow.registry import flow_policy


def flow(name: str = "f", size: int = 40, due_s: float | None = 2.0) -> Flow:
    return Flow(
        flow_id=name,
        request_id=f"r-{name}",
        batch="b",
        stage=Stage.P2D,
        source="a",
        target="z",
        size=size,
        due_s=due_s,
        least=10,
    )


def about(seconds: float) -> float:
    """Returns a duration that equals any that differs by rounding only."""
    return cast(float, pytest.approx(seconds))


def joined(silent_s: float = 0.020) -> Reader:
    reader = Reader(ReaderConfig(silent_s))
    assert reader.joined(0.0) == []
    return reader


CHUNKS = (10, 10, 10, 10)


def test_a_read_is_posted_chunk_by_chunk_as_it_is_permitted() -> None:
    reader = joined()
    assert reader.submit(flow(), CHUNKS, 9.0, 1.0) == [Send(SubmitFlow(flow()))]
    # 25 bytes hold two chunks of 10, not three
    first = Post("f", 0, 2, 20, 3)
    assert reader.received(Permitted("f", 25, 3), 1.1) == [first]
    second = Post("f", 2, 1, 10, 2)
    assert reader.received(Permitted("f", 10, 2), 1.2) == [second]
    assert reader.chunk_done(first, 0.2, 1.3) == [Send(ChunkDone("f", 20, 0.2))]
    assert reader.chunk_done(second, 0.2, 1.4) == [Send(ChunkDone("f", 10, 0.2))]
    third = Post("f", 3, 1, 10, 1)
    assert reader.received(Permitted("f", 10, 1), 1.6) == [third]
    # it waited from 1.0 to 1.1 and from 1.4 to 1.6 with nothing in flight
    ended = reader.chunk_done(third, 0.1, 1.7)
    assert ended == [Send(ChunkDone("f", 10, 0.1, True)), Finished("f", False, about(0.3), None, 3)]
    assert (reader.permits, reader.unscheduled, reader.waits) == (3, {}, False)


def test_a_permit_allows_at_least_one_chunk_and_a_whole_one_allows_all() -> None:
    reader = joined()
    reader.submit(flow(), CHUNKS, 9.0, 0.0)
    assert reader.received(Permitted("f", 3, 1), 0.0) == [Post("f", 0, 1, 10, 1)]
    assert reader.received(Permitted("f", 3, 1, whole=True), 0.0) == [Post("f", 1, 3, 30, 1)]
    assert reader.received(Permitted("f", 3, 1), 0.0) == []


@pytest.mark.parametrize("bytes_per_s", [1e6, 5e6, 50e6, 1.25e9])
@pytest.mark.parametrize(
    "chunks",
    [chunks_of(10_000_001), [1_000_000] * 10 + [1], [3_000_000, 64_000, 64_000, 6_872_001]],
    ids=["short", "long", "unequal"],
)
def test_no_permit_comes_for_what_is_posted_already(bytes_per_s: float, chunks: list[int]) -> None:
    size, reader = 10_000_001, joined()
    arbiter = Arbiter(flow_policy("mfs"), ArbiterConfig(port_bytes_per_s=bytes_per_s))
    (sent,) = reader.submit(flow(size=size), chunks, 9.0, 0.0)
    assert isinstance(sent, Send) and isinstance(sent.message, SubmitFlow)
    todo, now_s, given, posts = list(arbiter.apply(Submitted(sent.message.flow), 0.0)), 0.0, 0, 0
    while todo:
        permit, given = todo.pop(0), given + 1
        for post in reader.received(Permitted("f", permit.size, permit.level, permit.whole), now_s):
            assert isinstance(post, Post) and (permit.whole or post.size <= permit.size)
            posts, now_s = posts + 1, now_s + post.size / bytes_per_s
            for done in reader.chunk_done(post, post.size / bytes_per_s, now_s):
                if isinstance(done, Send) and isinstance(done.message, ChunkDone):
                    said = done.message
                    todo += arbiter.apply(Done("f", said.size, said.seconds, said.last), now_s)
    assert (given, len(arbiter), reader.waits) == (posts, 0, False)
    assert given >= min(8, size / max(0.030 * bytes_per_s, 2 * max(chunks)))


def test_chunks_add_up_and_are_bounded_in_number_and_size() -> None:
    for size in (1, 65_536, 65_537, 10**7, 2**40):
        chunks = chunks_of(size)
        assert (sum(chunks), min(chunks) > 0, max(chunks) - min(chunks) <= 1) == (size, True, True)
        assert max(chunks) <= CHUNK_BYTES or len(chunks) == MOST_CHUNKS


def test_without_an_agent_a_read_is_posted_whole_at_once() -> None:
    reader = Reader()
    post = Post("f", 0, 4, 40, None)
    assert reader.submit(flow(), CHUNKS, 9.0, 0.0) == [post]
    assert reader.chunk_done(post, 0.5, 0.5) == [Finished("f", False, 0.0, "no_agent")]


def test_silence_counts_only_the_workers_own_time_and_every_message_ends_it() -> None:
    reader = joined()
    reader.submit(flow(), CHUNKS, 9.0, 0.0)
    assert reader.tick(5.0, 0.019) == []
    assert reader.received(Beat(), 5.0) == []
    assert reader.tick(5.1, 0.019) == []
    assert reader.tick(5.2, 0.001) == [
        Post("f", 0, 4, 40, None),
        Send(Unscheduled("f", 40, "silent", 5.2)),
    ]


def test_while_the_agent_is_silent_no_new_read_is_held_and_its_first_word_ends_that() -> None:
    reader = joined()
    reader.submit(flow("a"), CHUNKS, 9.0, 0.0)
    reader.tick(0.02, 0.02)
    assert reader.submit(flow("b"), CHUNKS, 9.0, 1.0) == [
        Send(SubmitFlow(flow("b"))),
        Post("b", 0, 4, 40, None),
        Send(Unscheduled("b", 40, "silent", 0.0)),
    ]
    assert reader.received(Permitted("b", 40, 1), 2.0) == []
    assert reader.submit(flow("c"), CHUNKS, 9.0, 2.0) == [Send(SubmitFlow(flow("c")))]
    assert reader.held == ("c",)
    assert reader.unscheduled == {"silent": 2}


def test_the_silence_before_a_read_is_held_does_not_count() -> None:
    reader = joined()
    reader.submit(flow("a"), CHUNKS, 9.0, 0.0)
    reader.tick(0.015, 0.015)
    reader.abort("a", 0.015)
    reader.submit(flow("b"), CHUNKS, 9.0, 0.015)
    assert reader.tick(0.03, 0.015) == []


def test_at_its_bound_a_read_is_posted_though_the_agent_lives() -> None:
    reader = joined()
    reader.submit(flow(), CHUNKS, 0.5, 1.0)
    first = Post("f", 0, 1, 10, 4)
    assert reader.received(Permitted("f", 10, 4), 1.1) == [first]
    reader.received(Beat(), 1.49)
    assert reader.tick(1.49, 0.001) == []
    reader.received(Beat(), 1.5)
    rest = Post("f", 1, 3, 30, None)
    assert reader.tick(1.5, 0.001) == [rest, Send(Unscheduled("f", 30, "bound", about(0.1)))]
    # the agent hears of every chunk, and of the end with the last
    assert reader.chunk_done(rest, 0.3, 1.8) == [Send(ChunkDone("f", 30, 0.3))]
    ended = reader.chunk_done(first, 0.8, 1.9)
    assert ended == [Send(ChunkDone("f", 10, 0.8, True)), Finished("f", False, about(0.1), "bound", 4)]


def test_a_new_agent_is_told_what_is_left_and_what_is_on_its_way() -> None:
    reader = joined()
    reader.submit(flow("a"), CHUNKS, 9.0, 0.0)
    done = reader.received(Permitted("a", 10, 1), 0.0)[0]
    reader.received(Permitted("a", 10, 1), 0.0)
    assert isinstance(done, Post)
    reader.chunk_done(done, 0.1, 0.1)
    reader.lost()
    assert reader.tick(0.11, 0.01) == []
    again = reader.joined(0.5)
    # 10 have arrived, 10 are in flight, 20 are held; 0.5 s of the deadline are over
    assert again == [Send(SubmitFlow(flow("a", 30, 1.5), in_flight=(10,)))]


def test_a_lost_agent_holds_nothing_for_longer_than_a_silent_one() -> None:
    reader = joined()
    reader.submit(flow(), CHUNKS, 9.0, 0.0)
    reader.lost()
    assert reader.tick(0.01, 0.01) == []
    post = Post("f", 0, 4, 40, None)
    assert reader.tick(0.02, 0.01) == [post]
    # the next agent learns of bytes that are in flight, because they load its ports
    assert reader.joined(0.1) == [
        Send(SubmitFlow(flow("f", 40, 1.9), in_flight=(40,))),
        Send(Unscheduled("f", 40, "agent_lost", about(0.02))),
    ]
    assert reader.chunk_done(post, 0.3, 0.3) == [
        Send(ChunkDone("f", 40, 0.3, True)),
        Finished("f", False, about(0.02), "agent_lost"),
    ]


def test_a_new_agent_hears_of_reads_that_were_posted_without_a_permit_and_are_not_over() -> None:
    """Of `f` 10 bytes are in flight by permit, and the others without one; of `g` all. `h` is aborted."""
    reader = joined()
    reader.submit(flow("f"), CHUNKS, 0.5, 0.0)
    reader.received(Permitted("f", 10, 4), 0.0)
    (rest, _) = cast(list[Post], reader.tick(0.5, 0.001))
    reader.lost()
    for name in "gh":
        reader.submit(flow(name), CHUNKS, 9.0, 1.0)
    reader.abort("h", 1.0)
    assert reader.joined(1.0) == [
        Send(SubmitFlow(flow("f", due_s=1.0), in_flight=(10, 30))),
        Send(Unscheduled("f", 30, "bound", 0.0)),
        Send(SubmitFlow(flow("g"), in_flight=(40,))),
        Send(Unscheduled("g", 40, "no_agent", 0.0)),
    ]
    # what has arrived is no longer on its way without a permit
    reader.chunk_done(rest, 0.5, 1.0)
    reader.lost()
    assert reader.joined(1.5)[:2] == [
        Send(SubmitFlow(flow("f", 10, due_s=0.5), in_flight=(10,))),
        Send(Unscheduled("f", 0, "bound", 0.0)),
    ]


def test_after_an_abort_nothing_is_posted_and_the_end_waits_for_the_chunk_in_flight() -> None:
    reader = joined()
    reader.submit(flow(), CHUNKS, 9.0, 0.0)
    post = reader.received(Permitted("f", 10, 1), 0.0)[0]
    assert isinstance(post, Post)
    assert reader.abort("f", 0.1) == [Send(WithdrawFlow("f", 10))]
    assert reader.received(Permitted("f", 10, 1), 0.1) == []
    assert reader.tick(99.0, 99.0) == []
    assert reader.abort("f", 0.2) == []
    assert reader.chunk_done(post, 0.2, 0.3) == [
        Send(ChunkDone("f", 10, 0.2, True)),
        Finished("f", True, 0.0, None, 1),
    ]


def test_an_abort_of_a_held_read_ends_it_at_once() -> None:
    reader = joined()
    reader.submit(flow(), CHUNKS, 9.0, 0.0)
    assert reader.abort("f", 0.1) == [Send(WithdrawFlow("f", 0)), Finished("f", True, 0.1, None)]
    assert reader.abort("f", 0.1) == []


def test_a_refused_flow_is_posted() -> None:
    reader = joined()
    reader.submit(flow(), CHUNKS, 9.0, 0.0)
    assert reader.received(FlowRefused("f", "too many"), 0.0) == [
        Post("f", 0, 4, 40, None),
        Send(Unscheduled("f", 40, "refused", 0.0)),
    ]


@pytest.mark.parametrize("chunks", [(), (40, 0), (50, -10), (10, 10)])
def test_chunks_that_are_not_the_flow_are_refused(chunks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="add up to 40"):
        joined().submit(flow(), chunks, 9.0, 0.0)


def test_an_id_in_use_and_a_chunk_that_was_not_posted_are_refused() -> None:
    reader = joined()
    reader.submit(flow(), CHUNKS, 9.0, 0.0)
    with pytest.raises(ValueError, match="being read already"):
        reader.submit(flow(), CHUNKS, 9.0, 0.0)
    with pytest.raises(ValueError, match="no chunk in flight"):
        reader.chunk_done(Post("f", 0, 1, 10, 1), 0.1, 0.1)


def test_a_chunk_that_failed_has_moved_no_bytes() -> None:
    """With 20 of 40 bytes in flight as two posts the read fails: the first failed, the second arrives all the same."""
    reader = joined()
    reader.submit(flow(), CHUNKS, 9.0, 0.0)
    (first,) = cast(list[Post], reader.received(Permitted("f", 10, 1), 0.0))
    (second,) = cast(list[Post], reader.received(Permitted("f", 10, 1), 0.0))
    assert reader.abort("f", 0.1) == [Send(WithdrawFlow("f", 20))]
    assert reader.chunk_done(first, None, 0.2) == [Send(ChunkDone("f", 0, 0.0))]
    assert reader.chunk_done(second, 0.2, 0.3) == [
        Send(ChunkDone("f", 10, 0.2, True)),
        Finished("f", True, about(0.0), None, 1),
    ]


def test_a_lower_layer_index_is_told_while_the_read_is_held_and_a_new_agent_hears_the_present_one() -> None:
    reader = joined()
    early = dataclasses.replace(flow(due_s=None), stage=Stage.REUSE, rli=3)
    reader.submit(early, CHUNKS, 9.0, 0.0)
    assert reader.advanced("f", 3) == [] and reader.advanced("unknown", 0) == []
    assert reader.advanced("f", 1) == [Send(AdvanceFlow("f", 1))]
    # it never rises again
    assert reader.advanced("f", 2) == []
    reader.lost()
    assert reader.advanced("f", 0) == []
    (told,) = reader.joined(0.01)
    assert isinstance(told, Send) and isinstance(told.message, SubmitFlow) and told.message.flow.rli == 0
    # all of it is posted: the index decides nothing any more
    reader.received(Permitted("f", 40, 1), 0.02)
    assert reader.advanced("f", 0) == []
