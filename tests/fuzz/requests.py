"""Hostile connections to an ingress: real router, engines that answer by themselves, real sockets.

A finding is a 5xx that is not said by design, an error in the log, an answer that does not come, something that stays
held when its client has gone, or memory that grows.
"""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from actors.wire import messages as wire
from actors.wire.channel import Channel
from app.ingress.config import IngressConfig
from app.ingress.http.listener import ListenerConfig
from app.ingress.http.protocol import FastHttpProtocol
from tests.app.ingress.rig import MODEL, Rig, ScriptedEngine, raw, rig
from tests.fuzz import mutate
from tests.fuzz.corpus import CHATS, COMPLETIONS, HEADERS, METHODS, PATHS, RAW
from tests.fuzz.talk import HANG_S, count_answers, receive, talk, unread
from tests.fuzz.watch import Watch

AT_ONCE = 16
"""Time after which an answer is missing. ASSUMPTION: the longest one takes a second on an idle machine."""
SAMPLE = 64
"""Samples of memory in one run."""
EXPECTED_5XX = {501}
"""A transfer coding that is not known. Everything else from 500 on would be ours."""

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Za-z -]+\r\ndate: ")


class Forgetful(ScriptedEngine):
    """An engine that answers by itself and keeps no list of what it was told."""

    def on_message(self, channel: Channel, message: wire.Message) -> None:
        super().on_message(channel, message)
        self.received.clear()
        self.told.clear()


def body(rng: Random, path: str) -> bytes:
    """Returns a body for `path`: right, changed, or nothing of the kind."""
    base = rng.choice(CHATS if "chat" in path else COMPLETIONS)
    kind = rng.randrange(12)
    if kind == 0:
        return mutate.deep(rng)
    if kind == 1:
        return mutate.as_json(rng, mutate.value(rng))
    if kind < 6:
        return mutate.as_json(rng, base)
    made = mutate.as_json(rng, mutate.of_value(rng, base))
    return mutate.of_bytes(rng, made) if kind == 6 else made


def request(rng: Random, wild: bool, headers: tuple[str, ...] = ()) -> bytes:
    """Returns one request with these headers and others. A `wild` one has any head, and changed bytes."""
    path = rng.choice(PATHS[:2] if rng.random() < 0.7 else PATHS)
    content = body(rng, path)
    if not wild:
        more = rng.sample(HEADERS, rng.choice((0, 0, 0, 1)))
        made = raw("POST" if path in PATHS[:2] else "GET", path, content, *headers, *more)
    else:
        lines = [
            f"{rng.choice(METHODS)} {path} HTTP/{rng.choice(('1.1', '1.1', '1.1', '1.0', '2.0', '0.9'))}"
        ]
        lines += [*headers, *rng.sample(HEADERS, rng.randrange(6))]
        if rng.random() < 0.7:
            lines += ["host: localhost", "content-type: application/json"]
        if rng.random() < 0.3:
            parts = [content[:7], content[7:]]
            lines.append("transfer-encoding: chunked")
            content = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"
        elif rng.random() < 0.8:
            lines.append(f"content-length: {len(content)}")
        made = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content
    return mutate.of_bytes(rng, made) if wild and rng.random() < 0.4 else made


def connection(rng: Random, headers: tuple[str, ...] = ()) -> tuple[int, bytes]:
    """Returns the number of requests of a client, each with these headers, and its bytes."""
    if rng.random() < 0.05:
        return 1, mutate.of_bytes(rng, rng.choice(RAW))
    count = rng.choice((1, 1, 2, 3, 8))
    wild = rng.random() < 0.3
    return count, b"".join(request(rng, wild, headers) for _ in range(count))


async def run(watch: Watch, seed: int, requests: int, folder: Path) -> None:
    """Sends about this number of requests, `AT_ONCE` connections at a time."""
    async with opened(folder) as made:
        await drive(watch, made, seed, requests)


@asynccontextmanager
async def opened(folder: Path, **options: Any) -> AsyncIterator[Rig]:
    """An ingress in its fleet; `options` are further fields of its configuration."""
    config = IngressConfig(
        served_names=(MODEL,),
        sweep_interval_s=0.02,
        max_body_bytes=150_000,
        max_waiting_bytes=10**8,
        **options,
    )
    engines: list[ScriptedEngine] = [
        Forgetful("p", "prefill", folder, max_model_len=48), Forgetful("d", "decode", folder, max_model_len=48),
    ]  # fmt: skip
    # no limit of time ends a case before it is looked at
    listener = ListenerConfig(port=0, request_read_s=3600.0, keep_alive_s=3600.0)
    async with rig(folder, engines, config, listener, product=True) as made:
        yield made


async def drive(
    watch: Watch,
    made: Rig,
    seed: int,
    requests: int,
    headers: Callable[[Random], tuple[str, ...]] = lambda rng: (),
    beside: Callable[[Random], Awaitable[None]] | None = None,
) -> None:
    """Sends about this number of requests, each with some `headers`, and does `beside` after every connection of the
    first client. At the end nothing may be held, and an ordinary client be served.
    """
    left, every = requests, max(1, requests // SAMPLE)
    next_sample = requests

    async def client(number: int) -> None:
        nonlocal left, next_sample
        rng = Random(f"{seed}/{number}")
        while left > 0 and not watch.over:
            count, data = connection(rng, headers(rng))
            left -= count
            await _talk(watch, made, rng, count, data)
            if beside is not None and number == 0:
                await beside(rng)
            if left <= next_sample:
                next_sample = left - every
                watch.sample()

    await asyncio.gather(*(client(number) for number in range(AT_ONCE)))
    await _settled(watch, made)


async def _talk(watch: Watch, made: Rig, rng: Random, count: int, data: bytes) -> None:
    """Sends the bytes, and waits for what is answered, or leaves before."""

    async def rest(protocol: FastHttpProtocol, ours: socket.socket, got: bytearray) -> None:
        leaves = rng.random() < 0.05
        while not leaves and not _at_rest(protocol, ours):
            receive(ours, got)
            await asyncio.sleep(0)

    got = await talk(watch, made.listener._server, rng, data, rest)
    count_answers(watch, got, _STATUS, EXPECTED_5XX, count, data)


def _at_rest(protocol: FastHttpProtocol, ours: socket.socket) -> bool:
    """Returns whether the server has read what was sent and has nothing more to say to it."""
    transport = protocol.transport
    if protocol._closed or transport is None or transport.is_closing():
        return True
    if protocol._current is not None or protocol._waiting:
        return False
    return not unread(ours) and not transport.get_write_buffer_size()


async def _settled(watch: Watch, made: Rig) -> None:
    """Notes what is still held when all clients have gone, and whether an ordinary client is served."""
    server = made.listener._server
    assert server is not None
    bounds = server.config.http.keywords["bounds"]  # type: ignore[union-attr]
    try:
        async with asyncio.timeout(HANG_S):
            while server.server_state.connections or made.app.in_flight or made.app._parsing:
                await asyncio.sleep(0.01)
        await made.idle()
    except (TimeoutError, AssertionError) as error:
        watch.note(f"not idle: {error!r}")
    for name, held in (
        ("request bytes", made.app.request_memory.held_bytes),
        ("unread bytes", bounds.unread.held_bytes),
        ("connections", bounds.crowd._count),
        ("answer bytes", made.app.requests.answers.held_bytes),
        ("prompt bytes", made.app.requests.work.n_bytes),
        ("sequences", made.app.requests.work.sequences),
        ("characters of prompts to tokenise", made.app._intake_threads._chars),
        ("internal errors", int(made.metric("sluice_internal_errors_total", model=MODEL))),
    ):
        if held:
            watch.note(f"{held} {name} are left")
    answer = await made.client.post("/v1/chat/completions", json=made.chat())
    if answer.status_code != 200:
        watch.note(f"an ordinary request gets {answer.status_code} afterwards")
