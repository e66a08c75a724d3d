"""The load client against real HTTP servers on loopback: good answers, every kind of bad one, bounds."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from benchmarks.live.bare import LAST, ROLE, TOKEN, chunk
from benchmarks.live.load import Load, body_of, drive, request_bytes

PATH = "/v1/chat/completions"
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
# (n-th request, out) -> keep the connection?
Answer = Callable[[int, asyncio.StreamWriter], Awaitable[bool]]


class Server:
    """Requests that a test server has seen."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.port = 0
        self.requests: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.most_open = 0

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            keep = True
            while keep:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.requests.append(await reader.readexactly(size))
                keep = await self.answer(len(self.requests), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            self.open -= 1
            writer.close()


@contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    """The server in a thread with an event loop of its own."""
    server, started, loop = Server(answer), threading.Event(), asyncio.new_event_loop()

    async def main() -> None:
        listener = await asyncio.start_server(server.on_connection, "127.0.0.1", 0)
        server.port = listener.sockets[0].getsockname()[1]
        started.set()
        async with listener:
            await asyncio.Event().wait()

    def run() -> None:
        asyncio.set_event_loop(loop)
        task = loop.create_task(main())
        loop.call_soon(lambda: None)
        stop.append(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass  # that is how it ends
        finally:
            for left in asyncio.all_tasks(loop):
                left.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

    stop: list[Callable[[], object]] = []
    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    try:
        yield server
    finally:
        stop[0]()
        thread.join(10)


async def good(_number: int, out: asyncio.StreamWriter) -> bool:
    out.write(HEAD + ROLE)
    for _ in range(2):
        out.write(TOKEN)
        await out.drain()
    out.write(LAST)
    return True


def load(server: Server, **changes: object) -> Load:
    values: dict[str, object] = {
        "port": server.port,
        "path": PATH,
        "bodies": [body_of("m", f"prompt {i}", 3, chat=True) for i in range(3)],
        "concurrency": 4,
        "requests": 30,
        "max_s": 30.0,
    }
    return Load(**(values | changes))  # type: ignore[arg-type]


def test_good_answers() -> None:
    with serving(good) as server:
        result = drive(load(server))
    assert result.served == 30
    assert not result.failures
    assert server.connections == server.most_open == 4  # kept alive
    assert result.events == 30 * 5  # role, three tokens, [DONE]
    assert len(result.ttft_s) == len(result.stream_s) == 30
    assert all(0 < first <= whole for first, whole in zip(result.ttft_s, result.e2e_s, strict=True))
    assert result.client_cpu_s > 0
    prompts = [json.loads(body)["messages"][0]["content"] for body in server.requests]
    assert {prompt: prompts.count(prompt) for prompt in set(prompts)} == dict.fromkeys(
        ["prompt 0", "prompt 1", "prompt 2"], 10
    )


def test_fewer_requests_than_connections() -> None:
    with serving(good) as server:
        result = drive(load(server, concurrency=50, requests=3))
    assert (result.served, server.connections) == (3, 3)


def test_the_time_bounds_it() -> None:
    with serving(good) as server:
        result = drive(load(server, requests=10**9, max_s=2.0))
    assert result.served > 0
    assert not result.failures


async def refuse(_number: int, out: asyncio.StreamWriter) -> bool:
    out.write(b'HTTP/1.1 429 Too Many\r\ncontent-length: 16\r\n\r\n{"error":"full"}')
    return True


async def cut(_number: int, out: asyncio.StreamWriter) -> bool:
    out.write(HEAD + ROLE + TOKEN)
    return False


async def error_event(_number: int, out: asyncio.StreamWriter) -> bool:
    out.write(HEAD + ROLE + TOKEN + chunk(b'data: {"error":{"message":"engine died"}}\n\n') + chunk(b""))
    return True


async def garbage(_number: int, out: asyncio.StreamWriter) -> bool:
    out.write(b"\x00\x01\x02 no http\r\n\r\n")
    return False


async def bad_json(_number: int, out: asyncio.StreamWriter) -> bool:
    out.write(HEAD + chunk(b"data: {not json\n\n"))
    return False


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refuse, "status 429"),
        (cut, "connection ended"),
        (error_event, "engine died"),
        (garbage, "BadResponse"),
        (bad_json, "JSONDecodeError"),
    ],
)
def test_bad_answers_are_counted_and_never_sampled(answer: Answer, reason: str) -> None:
    with serving(answer) as server:
        result = drive(load(server, requests=5, concurrency=2))
    assert result.served == 0
    assert sum(result.failures.values()) == 5
    assert all(reason in failure for failure in result.failures)
    assert not result.ttft_s
    assert not result.stream_s


def test_one_bad_answer_spoils_no_other() -> None:
    async def every_third(number: int, out: asyncio.StreamWriter) -> bool:
        return await (cut if number % 3 == 0 else good)(number, out)

    with serving(every_third) as server:
        result = drive(load(server, requests=30, concurrency=3))
    assert result.served == 20
    assert sum(result.failures.values()) == 10


def test_a_server_that_closes_each_connection_is_reconnected_to() -> None:
    async def once(number: int, out: asyncio.StreamWriter) -> bool:
        head = HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        out.write(head + ROLE + TOKEN + LAST)
        return False

    with serving(once) as server:
        result = drive(load(server, requests=6, concurrency=2))
    assert (result.served, dict(result.failures), server.connections) == (6, {}, 6)


def test_answers_that_never_end_are_cut_and_counted() -> None:
    async def silent(_number: int, out: asyncio.StreamWriter) -> bool:
        out.write(HEAD + ROLE)
        await out.drain()
        await asyncio.sleep(60)
        return False

    with serving(silent) as server:
        result = drive(load(server, requests=3, concurrency=3, max_s=2.0, grace_s=0.2))
    assert result.served == 0
    assert result.failures["cut: not answered in time"] == 3


def test_nobody_listens() -> None:
    with serving(good) as server:
        port = server.port
    with pytest.raises(OSError, match=r"[Cc]onnect"):
        drive(Load(port, PATH, [b"{}"], 1, 1, 1.0))


def test_a_load_must_make_sense() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Load(1, PATH, [b"{}"], 0, 1, 1.0)


def test_request_bytes() -> None:
    raw = request_bytes("h", 80, "/p", b"{}")
    assert (
        raw
        == b"POST /p HTTP/1.1\r\nhost: h:80\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )


def test_each_body_goes_with_its_own_header_lines() -> None:
    made = request_bytes("h", 1, "/p", b"{}", ("x-request-id: a",))
    assert b"\r\nx-request-id: a\r\n" in made and made.endswith(b"\r\n\r\n{}")
    with pytest.raises(ValueError, match="each body needs one"):
        Load(1, PATH, [b"{}", b"{}"], 1, 1, 1.0, heads=[()])
