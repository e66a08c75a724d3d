"""A minimal HTTP listener that streams ready-made OpenAI chunks, one per tick, and does nothing else.

    python -m benchmarks.live.bare --port 8020

It is an `asyncio.Protocol` without router, engine, validation or tokeniser. On a given machine and with this client, no
Python ingress can be faster, so results are read as ratios to it. It answers every POST with `max_tokens` chunks of the
chat stream, and every GET with 200.
"""

import argparse
import asyncio
import json
import signal
from typing import Protocol, cast

import httptools

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(choice: str) -> bytes:
    """Returns a chunk-encoded server-sent event that contains `choice` (JSON)."""
    data = (
        '{"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"bare",'
        f'"choices":[{choice}]}}'
    )
    return chunk(f"data: {data}\n\n".encode())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


ROLE = event('{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}')
TOKEN = event('{"index":0,"delta":{"content":" word"},"finish_reason":null}')
LAST = (
    event('{"index":0,"delta":{"content":" word"},"finish_reason":"length"}')
    + chunk(b"data: [DONE]\n\n")
    + chunk(b"")
)


class Ticks(Protocol):
    """The interface of what makes the streams of a listener send."""

    def add(self, stream: "Listener") -> None: ...
    def drop(self, stream: "Listener") -> None: ...


class Ticker:
    """A timer that makes every active stream send once per tick."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._streams: set[Listener] = set()

    def add(self, stream: "Listener") -> None:
        if not self._streams:
            asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        self._streams.add(stream)

    def drop(self, stream: "Listener") -> None:
        self._streams.discard(stream)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time() + self._tick_s
        self._streams = {stream for stream in self._streams if stream.step()}
        if self._streams:
            loop.call_at(next_s, self._tick)


class Listener(asyncio.Protocol):
    """A connection, which serves one request at a time."""

    def __init__(self, ticker: Ticks) -> None:
        self._ticker = ticker
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._left = 0
        self._first = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ticker.drop(self)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_method() != b"POST":
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        self._left, self._first = int(json.loads(self._body)["max_tokens"]), True
        self._ticker.add(self)

    def step(self) -> bool:
        """Writes one token; returns False after the last."""
        data = TOKEN if self._left > 1 else LAST
        if self._first:
            data, self._first = HEAD + ROLE + data, False
        self._transport.write(data)
        self._left -= 1
        return self._left > 0


async def serve(port: int, tick_s: float) -> None:
    """Listens on loopback until SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    ticker = Ticker(tick_s)
    server = await loop.create_server(lambda: Listener(ticker), "127.0.0.1", port, backlog=1024)
    await stop.wait()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--tick-s", type=float, default=1e-3, help="time between two tokens (default: %(default)s)"
    )
    args = parser.parse_args()
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(args.port, args.tick_s))
    else:
        uvloop.run(serve(args.port, args.tick_s))


if __name__ == "__main__":
    main()
