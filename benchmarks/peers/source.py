"""A prefill or a decode engine of vLLM as a router beside it sees one, which computes nothing and ticks.

    python -m benchmarks.peers.source prefill --port 8031 --step-s 0.001
    python -m benchmarks.peers.source decode --port 8032 --step-s 0.001 --server bare

It speaks what vllm-router says to vLLM with NIXL: a request with `stream` false is a prefill, which is answered at once
with `kv_transfer_params`; one with `stream` true is answered with `max_tokens` chunks, one a step. Steps are those of
Sluice's sim engines: the same clock (`actors.engine.sim.clock`), one step for all streams, and a stream that arrives
during a step joins the next one. Prompts are not tokenised.

`--server uvicorn` is what a vLLM engine serves with. `--server bare` is the listener of `benchmarks.live.bare`, whose
chunks cost a fraction of that, so that what a router can do does not hide behind its source.
"""

import argparse
import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

import uvicorn
import uvloop

from actors.engine.sim.clock import StepClock
from benchmarks.live.bare import LAST, ROLE, TOKEN, Listener

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Stream(Protocol):
    """The interface of an answer that is being generated."""

    def step(self) -> bool:
        """Takes one token; returns False after the last."""


class Batch:
    """The streams of one engine, which step together on a sim engine's clock."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._waiting: list[Stream] = []
        self._running: list[Stream] = []
        self._gone: set[Stream] = set()
        self._clock = StepClock()
        self._joined = False

    def add(self, stream: Stream) -> None:
        """Adds a stream, which takes its first token at the end of the next step."""
        if not self._joined:
            self._clock.join(self)
            self._joined = True
        self._waiting.append(stream)
        self._clock.kick()

    def drop(self, stream: Stream) -> None:
        """Forgets a stream, whose reader has gone."""
        self._gone.add(stream)

    def begin_step(self) -> float | None:
        self._running = [one for one in (*self._running, *self._waiting) if one not in self._gone]
        self._waiting.clear()
        self._gone.clear()
        return self._step_s if self._running else None

    def end_step(self) -> None:
        self._running = [one for one in self._running if one not in self._gone and one.step()]


def prefilled(request: dict[str, Any]) -> bytes:
    """Returns the answer to a prefill: one token, and where its KV lies."""
    transfer = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill",
        "remote_block_ids": [1, 2, 3],
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
    }
    message = {"role": "assistant", "content": " word"}
    return json.dumps(
        {
            "id": "chatcmpl-0123456789abcdef",
            "object": "chat.completion",
            "created": 1700000000,
            "model": request.get("model", ""),
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            "kv_transfer_params": transfer,
        }
    ).encode()


# ------------------------------------------------------------------------------------------------ by the bare listener


class Connection(Listener):
    """A connection of the bare listener, which answers prefills too."""

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"POST":
            request = json.loads(self._body)
            if not request.get("stream"):
                body = prefilled(request)
                head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
                self._transport.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
                return
        super().on_message_complete()


async def serve_bare(port: int, batch: Batch) -> None:
    """Listens on loopback until SIGINT or SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server = await loop.create_server(lambda: Connection(batch), "127.0.0.1", port, backlog=1024)
    await stop.wait()
    server.close()


# ----------------------------------------------------------------------------------------------------------- by uvicorn


def data_of(chunked: bytes) -> bytes:
    """Returns the data of chunk-encoded events, which uvicorn encodes itself."""
    found = []
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        found.append(rest[: int(size, 16)])
        chunked = rest[int(size, 16) + 2 :]
    return b"".join(found)


_FIRST, _TOKEN, _LAST = data_of(ROLE), data_of(TOKEN), data_of(LAST)
_STREAMED = [(b"content-type", b"text/event-stream; charset=utf-8")]


class Answer:
    """An answer that uvicorn sends: the tokens that it has got, and the wait for the next."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens
        self._due = b""
        self._waits: asyncio.Future[None] | None = None

    def step(self) -> bool:
        self._left -= 1
        self._due += _TOKEN if self._left else _LAST
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)
        return self._left > 0

    async def next(self) -> tuple[bytes, bool]:
        """Returns (the events since the last call, whether more will come)."""
        if not self._due:
            self._waits = asyncio.get_running_loop().create_future()
            await self._waits
        due, self._due = self._due, b""
        return due, self._left > 0


class Application:
    """The ASGI application of a source, without a framework."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"a source serves HTTP, not {scope['type']}")
        if scope["method"] != "POST":
            await self._whole(send, b"{}")
            return
        request = json.loads(await _body(receive))
        if request.get("stream"):
            await self._stream(send, int(request["max_tokens"]))
        else:
            await self._whole(send, prefilled(request))

    async def _whole(self, send: Send, body: bytes) -> None:
        length = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), length]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send, tokens: int) -> None:
        answer, head, more = Answer(tokens), _FIRST, True
        self._batch.add(answer)
        try:
            while more:
                events, more = await answer.next()
                if head:
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAMED})
                await send({"type": "http.response.body", "body": head + events, "more_body": more})
                head = b""
        finally:
            if more:
                self._batch.drop(answer)


async def _body(receive: Receive) -> bytes:
    pieces, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client has gone before its request was whole")
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(pieces)


def main(argv: list[str] | None = None) -> None:
    """Serves until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.source", description=__doc__)
    parser.add_argument("role", choices=("prefill", "decode"), help="for the reader of the process table")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=1e-3, help="seconds of a step (default: %(default)s)")
    parser.add_argument("--server", choices=("uvicorn", "bare"), default="uvicorn")
    args = parser.parse_args(argv)
    batch = Batch(args.step_s)
    if args.server == "bare":
        uvloop.run(serve_bare(args.port, batch))
        return
    uvicorn.run(
        Application(batch),
        host="127.0.0.1",
        port=args.port,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
        backlog=1024,
    )


if __name__ == "__main__":
    main()
