"""The event stream: a snapshot, deltas, resumed after a break, and readers that do not read."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.dashboard import stream as stream_module
from app.dashboard.auth import TRIES, Keys, Sessions
from app.dashboard.feed import Feed
from app.dashboard.refusal import Refusal
from app.dashboard.stream import KEEP_S, Stream
from tests.app.dashboard.parts import SLO, VIEWER, dashboard
from tests.app.ingress.rig import make_router, until

T = 1_700_000_000.0


def running(seconds: int) -> tuple[Feed, Stream]:
    feed = Feed(SLO)
    stream = Stream(feed.snapshot)
    for second in range(seconds):
        stream.add(feed.tick(T + second))
    return feed, stream


def kinds(data: bytes) -> list[tuple[str, int]]:
    """The kind and the id of each event."""
    found = []
    for event in data.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.splitlines() if ": " in line)
        if "event" in lines:
            assert orjson.loads(lines["data"])["seq"] == int(lines["id"])
            found.append((lines["event"], int(lines["id"])))
    return found


async def test_a_reader_that_comes_back_gets_what_it_missed() -> None:
    feed, stream = running(10)
    last = feed.seq
    assert kinds(stream.next(None)[1]) == [("snapshot", last)]
    assert kinds(stream.next(last - 3)[1]) == [("delta", last - 2), ("delta", last - 1), ("delta", last)]
    assert stream.next(last) == (last, b"")
    # all readers of a delta get the same bytes
    assert stream.next(last - 1)[1] is stream.next(last - 1)[1]


@pytest.mark.parametrize("ago", [KEEP_S + 1, 100_000, -5])
async def test_a_reader_whose_place_is_not_kept_gets_a_snapshot(ago: int) -> None:
    feed, stream = running(200)
    assert kinds(stream.next(feed.seq - ago)[1]) == [("snapshot", feed.seq)]


async def test_deltas_that_are_kept_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "KEEP_BYTES", 1000)
    stream = Stream(lambda: {"seq": 9})
    for seq in range(1, 10):
        stream.add({"seq": seq, "text": "x" * 380})
    # each has some 400 bytes
    assert kinds(stream.next(7)[1]) == [("delta", 8), ("delta", 9)]
    assert kinds(stream.next(6)[1]) == [("snapshot", 9)]
    # one that is longer than all may be is kept: a reader that misses nothing else needs no snapshot
    stream.add({"seq": 10, "text": "x" * 5000})
    assert kinds(stream.next(9)[1]) == [("delta", 10)]


async def test_a_snapshot_is_made_once_for_all_readers_of_a_second() -> None:
    feed, stream = running(3)
    assert stream.next(None)[1] == stream.next(None)[1]
    first = stream.next(None)[1]
    stream.add(feed.tick(T + 100))
    assert stream.next(None)[1] != first


async def test_numbers_go_on_after_a_restart() -> None:
    before, _ = running(5)
    later = Feed(SLO)
    later.tick(T + 60)
    assert later.seq > before.seq


async def test_a_reader_that_reads_nothing_is_cut_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "UNREAD_S", 0.05)
    feed, stream = running(3)
    got: list[bytes] = []

    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def stuck(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def reads(message: dict[str, Any]) -> None:
        got.append(message.get("body", b""))

    good = asyncio.create_task(stream.serve(None, never, reads))
    await stream.serve(None, never, stuck)
    assert stream.readers == 1
    stream.add(feed.tick(T + 50))
    await until(lambda: kinds(b"".join(got)) == [("snapshot", feed.seq - 1), ("delta", feed.seq)])
    stream.stop()
    await good
    assert stream.readers == 0


@pytest.mark.parametrize("ending", ["expired", "key gone", "logout"])
async def test_a_stream_ends_with_its_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(stream_module, "CHECK_S", 0.0)
    router = make_router(tmp_path)
    await router.start([f"unix:{tmp_path}/r.sock"])
    try:
        async with dashboard(tmp_path, router) as board:
            answer = await board.client.post("/api/login", json={"key": VIEWER})
            cookie = {"cookie": answer.headers["set-cookie"].split(";")[0]}
            sessions = board.server._app._sessions

            async def read() -> list[bytes]:
                async with board.client.stream("GET", "/api/stream", headers=cookie) as stream:
                    return [piece async for piece in stream.aiter_raw()]

            reading = asyncio.create_task(read())
            await until(lambda: board.stream.readers == 1, "a reader")
            deltas = board.feed.seq
            await until(lambda: board.feed.seq > deltas + 1, "two more seconds")
            assert not reading.done()
            if ending == "expired":
                sessions.session_s = -1.0
            elif ending == "key gone":
                sessions._keys._viewer = ()
            else:
                headers = cookie | {"x-csrf-token": answer.json()["csrf"]}
                assert (await board.client.post("/api/logout", headers=headers)).status_code == 200
            async with asyncio.timeout(60):
                assert b"event: delta" in b"".join(await reading)
            # the cookie itself opens nothing any more, wherever it was kept
            assert (await board.client.get("/api/session", headers=cookie)).status_code == 401
    finally:
        await router.stop()


async def test_a_reader_with_a_key_is_not_cut_by_the_wrong_guesses_of_others() -> None:
    sessions = Sessions(Keys((VIEWER,), ()), 60.0)
    for _ in range(TRIES):
        with pytest.raises(Refusal):
            sessions.who(None, "Bearer guess", "10.0.0.1")
    assert sessions.holds("viewer", None, f"Bearer {VIEWER}")
    assert not sessions.holds("admin", None, f"Bearer {VIEWER}")
    assert not sessions.holds("viewer", None, "Bearer guess")


async def test_a_hundred_streams_of_which_one_is_never_read(tmp_path: Path) -> None:
    router = make_router(tmp_path)
    await router.start([f"unix:{tmp_path}/r.sock"])
    headers = (
        f"GET /api/stream HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {VIEWER}\r\n\r\n".encode()
    )
    try:
        async with dashboard(tmp_path, router) as board:
            pairs = [await asyncio.open_connection("127.0.0.1", board.server.port) for _ in range(100)]
            for _, writer in pairs:
                writer.write(headers)
            await until(lambda: board.stream.readers == 100, "100 readers")

            async def three_deltas(reader: asyncio.StreamReader) -> None:
                seen = b""
                while seen.count(b"event: delta") < 3:
                    seen += await reader.read(2**16)
                assert seen.index(b"event: snapshot") < seen.index(b"event: delta")

            async with asyncio.timeout(60):
                await asyncio.gather(*(three_deltas(reader) for reader, _ in pairs[1:]))
            bearer = {"authorization": f"Bearer {VIEWER}"}
            assert (await board.client.get("/api/status", headers=bearer)).status_code == 200
            for _, writer in pairs:
                writer.close()
            await until(lambda: board.stream.readers == 0, "no reader")
    finally:
        await router.stop()


async def test_a_reader_that_leaves_with_another_request_behind_its_stream_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = make_router(tmp_path)
    await router.start([f"unix:{tmp_path}/r.sock"])
    key = f"host: localhost\r\nauthorization: Bearer {VIEWER}\r\n\r\n"
    both = f"GET /api/stream HTTP/1.1\r\n{key}GET /api/status HTTP/1.1\r\n{key}"
    try:
        async with dashboard(tmp_path, router) as board:
            server = board.server._server
            assert server is not None
            _, writer = await asyncio.open_connection("127.0.0.1", board.server.port)
            writer.write(both.encode())
            await until(lambda: board.stream.readers == 1, "a reader")
            writer.close()
            await until(lambda: not server.server_state.tasks, "no task")
            assert board.stream.readers == 0
    finally:
        await router.stop()
    # without a word of it a stream ends by writing to a connection that is closed
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record for record in errors if not record.name.startswith("opentelemetry")] == []


@pytest.mark.parametrize("turns", range(8))
async def test_a_reader_that_leaves_as_something_comes_is_gone(turns: int) -> None:
    stream, left = Stream(lambda: {"seq": 0}), asyncio.Event()

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(_: dict[str, Any]) -> None:
        await asyncio.sleep(0)

    stream.add({"seq": 1})
    serving = asyncio.create_task(stream.serve(1, receive, send))
    for _ in range(20):
        await asyncio.sleep(0)
    left.set()
    # the news may come in any turn of the loop between the client's end and that of its task
    for _ in range(turns):
        await asyncio.sleep(0)
    stream.add({"seq": 2})
    async with asyncio.timeout(10):
        await serving
    assert stream.readers == 0
