"""An agent in a process of its own and real workers on its unix socket: permits, faults of the agent, bad workers."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.wire.channel import Channel, Identity
from actors.wire.messages import PROTOCOL_VERSION, ChunkDone, Hello, JoinNode, Message, SubmitFlow
from actors.wire.sockets import connect
from app.replay import main as replay_main
from policies.flow.base import Flow, Stage
from tests.actors.flow.rig import AgentProcess, ReadingWorker

SECRET = "s3"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """One agent for all tests; each leaves a running one behind."""
    process = AgentProcess(tmp_path_factory.mktemp("agent"), SECRET)
    yield process
    process.signal(signal.SIGCONT)
    process.kill()


def worker(
    agent: AgentProcess, name: str = "w", seconds: float = 0.0, silent_s: float = 30.0
) -> ReadingWorker:
    made = ReadingWorker(agent.address, name, SECRET.encode(), seconds, silent_s)
    made.run(lambda: made.client.connected)
    return made


def scheduled_again(one: ReadingWorker) -> None:
    """Reads until a read is scheduled; on a busy machine some reads go on without permits before that."""
    for attempt in range(2000):
        one.read(f"again{attempt}")
        one.run(one.done(f"again{attempt}"))
        if one.finished[f"again{attempt}"].unscheduled is None:
            return
    raise AssertionError("the worker never returned to the schedule")


def test_reads_of_two_workers_end_by_permits_alone(agent: AgentProcess) -> None:
    one, other = worker(agent, "one", 0.001), worker(agent, "other", 0.001)
    for number in range(20):
        one.read(f"f{number}")
        other.read(f"f{number}")
    names = [f"f{number}" for number in range(20)]
    while not (one.done(*names)() and other.done(*names)()):
        one.step()
        other.step()
        one.client.wait(0.001)
    for reader in (one.client.reader, other.client.reader):
        assert reader.unscheduled == {}
        assert reader.permits >= 20
    assert all(post.level is not None for post in one.posts + other.posts)


def test_a_killed_agent_holds_nothing_up_and_its_successor_schedules_again(agent: AgentProcess) -> None:
    one = worker(agent, seconds=0.01, silent_s=0.02)
    for number in range(30):
        one.read(f"f{number}")
    agent.kill()
    one.run(one.done(*(f"f{number}" for number in range(30))))
    assert not one.client.connected
    assert set(one.client.reader.unscheduled) <= {"agent_lost", "silent"}
    agent.start()
    one.run(lambda: one.client.connected)
    scheduled_again(one)


def test_a_stopped_agent_is_noticed_by_its_silence_and_comes_back(agent: AgentProcess) -> None:
    one = worker(agent, silent_s=0.02)
    agent.signal(signal.SIGSTOP)
    one.read("held")
    one.run(one.done("held"))
    assert one.finished["held"].unscheduled == "silent"
    one.read("later")
    assert one.posts[-1].flow_id == "later" and one.posts[-1].level is None
    agent.signal(signal.SIGCONT)
    scheduled_again(one)


def test_an_agent_that_starts_later_takes_over_what_is_held_and_in_flight(agent: AgentProcess) -> None:
    agent.kill()
    one = ReadingWorker(agent.address, "w", SECRET.encode(), seconds=0.2)
    one.step()
    one.read("early")
    assert one.posts[0].level is None
    agent.start()
    one.run(one.done("early"))
    one.run(lambda: one.client.connected)
    one.read("next")
    one.run(one.done("next"))
    assert one.finished["next"].unscheduled is None


def test_a_worker_with_a_wrong_secret_reads_without_permits(agent: AgentProcess) -> None:
    wrong = ReadingWorker(agent.address, "w", b"guess")
    wrong.run(lambda: "secret" in wrong.client.line_reason)
    wrong.read("f")
    wrong.run(wrong.done("f"))
    assert wrong.finished["f"].unscheduled == "no_agent"


def flow(**changed: object) -> Flow:
    facts = {
        "flow_id": "f",
        "request_id": "r",
        "batch": "b",
        "stage": Stage.P2D,
        "source": "a",
        "target": "z",
        "size": 10,
        "due_s": 1.0,
    }
    return Flow(**(facts | changed))  # type: ignore[arg-type]


async def raw(agent: AgentProcess, messages: list[Message]) -> Channel:
    """Sends messages after a proper handshake and returns the channel."""
    me = Identity("worker", "bad", SECRET.encode())
    channel = await connect((agent.address,), lambda: Channel(me, lambda channel, message: None))
    for message in messages:
        channel.send(message)
    return channel


def damaged(**fields: object) -> Flow:
    """Returns a flow that could not be made: `fields` are put into it behind its back."""
    made = flow()
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize(
    "messages",
    [
        [JoinNode("nowhere")],
        [JoinNode("z"), JoinNode("z")],
        [SubmitFlow(flow())],
        [JoinNode("z"), SubmitFlow(flow(source="nowhere"))],
        [JoinNode("z"), SubmitFlow(flow(target="a"))],
        [JoinNode("z"), SubmitFlow(flow()), SubmitFlow(flow())],
        [JoinNode("z"), SubmitFlow(damaged(size=-1))],
        [JoinNode("z"), SubmitFlow(damaged(due_s=float("nan")))],
        [JoinNode("z"), SubmitFlow(flow(), in_flight=(5, 6))],
        [JoinNode("z"), SubmitFlow(flow()), ChunkDone("f", 10, 0.1)],
        [JoinNode("z"), SubmitFlow(damaged(size=float("nan")))],
        [JoinNode("z"), *(SubmitFlow(flow(flow_id=f"f{number}")) for number in range(9000))],
    ],
    ids=lambda messages: "-".join(type(message).__name__ for message in messages[:3]),
)
async def test_a_bad_worker_ends_alone(agent: AgentProcess, messages: list[Message]) -> None:
    good = worker(agent, "good")
    channel = await raw(agent, messages)
    assert "closed" in await asyncio.wait_for(channel.closed, 60) or channel.closed.done()
    good.read("f")
    good.run(good.done("f"))
    assert good.finished["f"].unscheduled is None


async def test_an_old_protocol_is_refused(agent: AgentProcess) -> None:
    good = worker(agent, "good")
    reader, writer = await asyncio.open_unix_connection(agent.address.removeprefix("unix:"))
    from actors.wire.frames import ENCODER, HEADER

    body = ENCODER.encode([Hello(PROTOCOL_VERSION - 1, "worker", "old", b"n" * 16)])
    writer.write(HEADER.pack(len(body)) + body)
    # the agent's Hello, then the end
    await asyncio.wait_for(reader.read(), 60)
    assert reader.at_eof()
    writer.close()
    good.read("f")
    good.run(good.done("f"))
    assert good.finished["f"].unscheduled is None


def test_the_journal_of_an_agent_replays_to_the_same_permits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = AgentProcess(tmp_path, SECRET, journal=str(tmp_path / "journal"))
    try:
        one = worker(process)
        for number in range(30):
            one.read(f"f{number}", due_s=1.0 + number)
        one.run(one.done(*(f"f{number}" for number in range(30))))
        process.signal(signal.SIGTERM)
        process.process.wait()
    finally:
        process.kill()
    assert replay_main([str(tmp_path / "journal")]) == 0
    said = capsys.readouterr().out
    assert "0 different" in said
    assert "events of flows, 0 permits" not in said
