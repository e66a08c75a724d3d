"""The desk: what a worker breaks ends with its connection, and desk and arbiter stay of one mind."""

import pytest

from actors.flow.desk import BadMessage, Desk, Ended, Worker
from actors.flow.reader import Post, Reader, Send
from actors.wire.messages import (
    ChunkDone,
    ChunkPosted,
    FlowRefused,
    JoinNode,
    Message,
    Permitted,
    SubmitFlow,
    Unscheduled,
    WithdrawFlow,
)
from policies.flow.arbiter import Arbiter
from policies.flow.base import Flow, Stage
from policies.flow.config import ArbiterConfig
from policies.flow.registry import flow_policy


def flow(name: str, size: int = 100, source: str = "a", target: str = "z") -> Flow:
    return Flow(
        flow_id=name,
        request_id=name,
        batch=name,
        stage=Stage.P2D,
        source=source,
        target=target,
        size=size,
        due_s=5.0,
    )


def made_desk(**config: object) -> Desk:
    return Desk(Arbiter(flow_policy("mfs"), ArbiterConfig(**config)), {"a", "y", "z"})  # type: ignore[arg-type]


def came(desk: Desk, node: str = "z", agent: bool = False) -> tuple[Worker, list[Message]]:
    sent: list[Message] = []
    worker = desk.came(f"w-{node}", sent.append, agent)
    desk.take(worker, JoinNode(node), 0.0)
    return worker, sent


@pytest.mark.parametrize(
    "messages",
    [
        [ChunkDone("f", 100, 0.1)],
        [WithdrawFlow("f", 60), ChunkDone("f", 40, 0.1), ChunkDone("f", 20, 0.1)],
        [ChunkDone("f", 101, 0.1, True)],
        [ChunkDone("f", 10, float("nan"))],
        [ChunkDone("f", -1, 0.1)],
        [ChunkDone("other", 1, 0.1)],
        [ChunkPosted("f")],
        [Unscheduled("f", -1, "bound")],
        [Unscheduled("f", 101, "bound")],
    ],
)
def test_a_report_that_cannot_be_ends_its_connection_and_changes_nothing_else(
    messages: list[Message],
) -> None:
    desk = made_desk()
    worker, _ = came(desk)
    other, sent = came(desk)
    desk.take(worker, SubmitFlow(flow("f")), 0.0)
    desk.take(other, SubmitFlow(flow("f")), 0.0)
    *before, bad = messages
    for message in before:
        desk.take(worker, message, 1.0)
    with pytest.raises(BadMessage):
        desk.take(worker, bad, 1.0)
    # a report to the router asks for this
    assert desk.held(1.0) == {}
    desk.left(worker, 1.0)
    assert (len(desk), len(desk.arbiter), desk.open) == (1, 1, 1)
    desk.take(other, ChunkDone("f", 100, 0.1, True), 2.0)
    assert (len(desk), len(desk.arbiter), desk.open) == (0, 0, 0)
    assert [type(message) for message in sent] == [Permitted]


def test_what_goes_on_without_permits_is_counted_once() -> None:
    """Another agent says it when this one was silent, and again when its own worker does."""
    desk = made_desk()
    desk.owned.add("a")
    peer, _ = came(desk, "y", agent=True)
    desk.take(peer, SubmitFlow(flow("f", target="y")), 0.0)
    desk.take(peer, Unscheduled("f", 100, "silent"), 1.0)
    desk.take(peer, Unscheduled("f", 100, "bound"), 2.0)
    totals = {name: count for name, count in desk.totals.items() if "unscheduled" in name}
    assert totals == {"lent_unscheduled_reads_silent": 1, "lent_unscheduled_bytes": 100}


def test_a_read_that_was_posted_while_there_was_no_agent_is_recorded_as_unscheduled() -> None:
    reader, desk = Reader(), made_desk()
    worker, _ = came(desk)
    (post,) = reader.submit(flow("f"), [60, 40], 9.0, 0.0)
    assert isinstance(post, Post)
    for action in [*reader.joined(1.0), *reader.chunk_done(post, 2.0, 2.0)]:
        if isinstance(action, Send):
            desk.take(worker, action.message, 2.0)
    assert [(one.unscheduled, one.chunks) for one in desk.ended] == [("no_agent", 1)]
    assert desk.totals["unscheduled_reads_no_agent"] == desk.totals["submitted"] == 1
    assert (len(desk), len(desk.arbiter), desk.open) == (0, 0, 0)


def test_the_time_that_flows_were_held_is_of_the_level_at_which_they_were_permitted_last() -> None:
    """The port is free for `f` at once; `g` and `h` wait behind it. `h` is withdrawn while it is read."""
    desk = made_desk(window=1)
    worker, sent = came(desk)
    for name in "fgh":
        desk.take(worker, SubmitFlow(flow(name)), 0.0)
    desk.take(worker, ChunkDone("f", 100, 0.1, True), 2.0)
    desk.take(worker, ChunkDone("g", 100, 0.1, True), 5.0)
    desk.take(worker, WithdrawFlow("h", 0), 6.0)
    # h was at level 8, too, until its deadline of 5 s had come
    permits = [(message.flow_id, message.level) for message in sent if isinstance(message, Permitted)]
    assert permits == [("f", 8), ("g", 8), ("h", 9)]
    # nothing of f; g for 2 s; h until its permit of 5 s
    assert desk.ended_at == {8: Ended(2, 2.0), 9: Ended(1, 5.0)}


def test_another_nodes_agent_fills_half_of_the_arbiter_at_most_and_a_flood_ends_it() -> None:
    desk = made_desk(most_flows=8)
    desk.owned.add("a")
    peer, sent = came(desk, "y", agent=True)
    for number in range(8):
        desk.take(peer, SubmitFlow(flow(f"f{number}", target="y")), 0.0)
    refused = [message.flow_id for message in sent if isinstance(message, FlowRefused)]
    assert refused == ["f4", "f5", "f6", "f7"]
    with pytest.raises(BadMessage, match="8 flows are open"):
        desk.take(peer, SubmitFlow(flow("f8", target="y")), 0.0)
    own, heard = came(desk)
    desk.take(own, SubmitFlow(flow("g")), 0.0)
    assert not heard or isinstance(heard[0], Permitted)
    desk.left(peer, 1.0)
    assert [type(message) for message in heard] == [Permitted]
    # what was refused ends as what was not does
    desk.take(own, ChunkDone("g", 100, 0.1, True), 1.0)
    assert (len(desk), len(desk.arbiter), desk.open) == (0, 0, 0)
