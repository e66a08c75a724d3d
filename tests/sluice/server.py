"""A real HTTP/1.1 server on loopback that says exactly the bytes a test wants, right or wrong.

Handlers are coroutines over a `Wire`; a route's handlers are used one after the other, the last one again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

WAIT_S = 60.0
"""How long tests wait for something that must happen; only a failure takes that long."""


@dataclass(frozen=True)
class Request:
    """One request as it came over the wire."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Wire:
    """The answering side of one request."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    server: ContractServer
    closed: bool = field(default=False)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def respond(self, status: int, body: Any, **headers: str) -> None:
        """A complete response; anything but bytes is sent as JSON. `retry_after` becomes `retry-after`."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {"content-type": "application/json", "content-length": str(len(content))}
        head.update({name.replace("_", "-"): value for name, value in headers.items()})
        await self.send(_head(status, head) + content)

    async def start_stream(self, **headers: str) -> None:
        head = {"content-type": "text/event-stream", "transfer-encoding": "chunked"}
        head.update({name.replace("_", "-"): value for name, value in headers.items()})
        await self.send(_head(200, head))

    async def piece(self, data: bytes) -> None:
        """One HTTP chunk with these bytes."""
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def event(self, content: Any) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        await self.piece(f"data: {text}\n\n".encode())

    async def end_stream(self, *, done: bool = True) -> None:
        if done:
            await self.event("[DONE]")
        await self.send(b"0\r\n\r\n")

    def cut(self) -> None:
        """Closes the connection, whatever was promised."""
        self.closed = True
        self.writer.close()

    async def until_client_leaves(self) -> None:
        """Waits for the client's end of file and tells the test."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(4096):
                pass
        self.server.client_left.set()
        self.cut()


Handler = Callable[[Request, Wire], Awaitable[None]]


class ContractServer:
    """Runs in a thread of its own; `url` is its base URL."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.arrived = threading.Event()
        self.client_left = threading.Event()
        self._routes: dict[str, list[Handler]] = defaultdict(list)
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def on(self, route: str, *handlers: Handler) -> None:
        """`route` is e.g. "POST /v1/chat/completions"."""
        self._routes[route] = list(handlers)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(WAIT_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._connections += 1
        number = self._connections
        try:
            while True:
                request = await _read(reader, number)
                self.requests.append(request)
                self.arrived.set()
                wire = Wire(reader, writer, self)
                await self._handler(request)(request, wire)
                if wire.closed:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client has closed the connection
        finally:
            writer.close()

    def _handler(self, request: Request) -> Handler:
        handlers = self._routes[f"{request.method} {request.path}"]
        if not handlers:
            return not_found
        return handlers.pop(0) if len(handlers) > 1 else handlers[0]


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _read(reader: asyncio.StreamReader, connection: int) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, path, headers, body, connection)


async def not_found(request: Request, wire: Wire) -> None:
    await wire.respond(404, api_error(f"no route {request.path}", code="not_found"), x_request_id="req-404")


def api_error(message: str, **fields: Any) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {"error": {"message": message, "type": None, "param": None, "code": None, **fields}}


def answers(status: int, body: Any, **headers: str) -> Handler:
    """A handler with one complete response."""

    async def handle(request: Request, wire: Wire) -> None:
        await wire.respond(status, body, **headers)

    return handle


def chat_chunk(text: str | None, *, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": "c1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
        **fields,
    }


def usage_chunk(prompt: int, completion: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {
        "id": "c1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [],
        "usage": usage,
    }


def chat_answer(text: str = "Hello there", **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
        **fields,
    }


def streams(*texts: str, usage: tuple[int, int] | None = None) -> Handler:
    """A handler that streams these texts well to the end."""

    async def handle(request: Request, wire: Wire) -> None:
        await wire.start_stream(x_request_id="req-stream")
        for text in texts:
            await wire.event(chat_chunk(text))
        await wire.event(chat_chunk(None, finish="stop"))
        if usage is not None:
            await wire.event(usage_chunk(*usage))
        await wire.end_stream()

    return handle
