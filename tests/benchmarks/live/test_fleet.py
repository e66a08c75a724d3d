"""The client of a fleet that changes, against real sockets: streams with their texts, routes of a real journal, and
orders given by hand to a real router.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.wire.channel import Channel, Identity
from actors.wire.messages import Assign, Message
from actors.wire.sockets import listen
from benchmarks.live.fleet import Answer, Streams, first_tokens
from benchmarks.live.openloop import Planned
from benchmarks.live.servers import ServerError, free_ports
from benchmarks.steering import HAND_GENERATION, HandGiven, first_routes
from policies.dispatch.actions import RouteDecode, RoutePrefill
from policies.journal.lines import action_line
from policies.network.oracle import TransferIntent
from policies.routing.base import Decision, Reason

EVENTS = (
    b'data: {"id":"cmpl-abc","choices":[{"index":0,"text":"one","finish_reason":null}]}\n\n'
    b'data: {"id":"cmpl-abc","choices":[{"index":0,"text":" two","finish_reason":"length"}]}\n\n'
    b"data: [DONE]\n\n"
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"


class Server:
    """A listener that answers every request with `answer`, the first `refused` ones by ending the connection."""

    def __init__(self, refused: int = 0) -> None:
        self.refused, self.seen = refused, 0
        (self.port,) = free_ports(1)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60.0)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(self._one, "127.0.0.1", self.port):
            self._ready.set()
            await self._end.wait()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.seen += 1
        if self.seen > self.refused:
            # in two pieces, cut within an event
            writer.write(HEAD % len(EVENTS) + EVENTS[:50])
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(EVENTS[50:])
            await writer.drain()
        writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10.0)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(refused=1)
    yield made
    made.close()


def test_streams_keep_text_and_id_and_say_which_answer_was_cut(server: Server) -> None:
    streams = Streams(server.port)
    # one after the other: the server refuses the first that it sees
    [cut] = streams.send([Planned(0.0, b"{}")], 60.0).result(100.0)
    [whole] = streams.send([Planned(0.0, b"{}")], 60.0).result(100.0)
    assert cut.problem is not None and cut.problem.startswith("connection ended")
    assert (whole.problem, whole.text, whole.request_id) == (None, "one two", "abc")
    assert whole.sent_s < whole.first_s <= whole.last_s
    with streams.kept(lambda number: b"{}", 3) as answers:
        while len(answers) < 6:
            pass
    # those that were open at the end have ended too
    assert len(answers) == server.seen - 2
    assert {answer.text for answer in answers} == {"one two"}
    streams.close()


def test_a_server_that_is_not_there_is_a_problem_of_each_answer() -> None:
    (port,) = free_ports(1)
    streams = Streams(port)
    [answer] = streams.send([Planned(0.0, b"{}")], 5.0).result(10.0)
    assert answer.problem is not None and answer.problem.startswith("no connection")
    streams.close()


def routed(attempt: str, worker: str) -> str:
    decision = Decision(worker, (), Reason.ONLY_CANDIDATE)
    return action_line(RouteDecode(attempt, decision, 0.0, TransferIntent(attempt, "p-1", worker, 1, 0)))


def prefilled(attempt: str, worker: str, colocated: bool) -> str:
    return action_line(
        RoutePrefill(attempt, Decision(worker, (), Reason.ONLY_CANDIDATE), colocated, False, 0.0)
    )


def test_the_first_route_of_each_request_and_the_first_text_of_each_engine(tmp_path: Path) -> None:
    lines = [routed("a-0", "d-1"), routed("a-1", "d-2"), routed("b-0", "d-2#0"), routed("c-0", "d-1")]
    lines += [prefilled("e-0", "p-1", False), prefilled("f-0", "c-1", True)]
    (tmp_path / "journal-0.jsonl").write_text("\n".join(lines) + "\n" + routed("d-0", "d-3")[:40])
    routes = first_routes(tmp_path)
    assert routes == {"a": "d-1", "b": "d-2", "c": "d-1", "f": "c-1"}

    def answer(request: str, first_s: float) -> Answer:
        return Answer(0.0, first_s, 9.0, None, EVENTS.replace(b"cmpl-abc", f"cmpl-{request}".encode()))

    answers = [answer("c", 6.0), answer("a", 5.5), answer("b", 4.0)]
    assert first_tokens(answers, routes, ["d-1", "d-2", "d-3"], 5.0) == {"d-1": 0.5}
    assert first_tokens(answers, routes, ["d-1", "d-2"], 3.0) == {"d-1": 2.5, "d-2": 1.0}


def test_orders_by_hand_reach_the_router_with_the_latest_generation(tmp_path: Path) -> None:
    heard: list[tuple[int, Message]] = []
    ready, end = threading.Event(), threading.Event()

    async def router() -> None:
        def taken(channel: Channel, message: Message) -> None:
            assert channel.peer is not None
            heard.append((channel.peer.generation, message))

        me = Identity("router", "router-test", generation=1)
        server, _ = await listen(f"unix:{tmp_path}/router-test.sock", lambda: Channel(me, taken))
        ready.set()
        await asyncio.to_thread(end.wait, 100.0)
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(router()), daemon=True)
    thread.start()
    assert ready.wait(60.0)
    hand = HandGiven(tmp_path)
    hand.assign("d-1", "prefill")
    hand.assign("d-2", "decode", "warm")
    hand.close()
    deadline_s = time.monotonic() + 60.0
    while len(heard) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    end.set()
    thread.join(60.0)
    assert heard == [
        (HAND_GENERATION, Assign("d-1", "prefill", "active")),
        (HAND_GENERATION, Assign("d-2", "decode", "warm")),
    ]


def test_orders_by_hand_need_a_router(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="no connection to the router"):
        HandGiven(tmp_path)
