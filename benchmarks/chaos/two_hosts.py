"""A prefill and a decode engine of vLLM on two hosts with a link between them, a flow agent, and their one client.

The client stands for router and ingress: the engines report to it, and it sends each prompt to the prefill engine and
the handle of its KV to the decode engine. An engine or agent that was killed is started again by `begin`, and the
client connects to it anew. Engines read by permits, compare all blocks by checksums, and keep no prompt: every answer
rests on KV that was read.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.wire.channel import Channel, Identity, WireError
from actors.wire.messages import (
    Admitted,
    Announce,
    Decode,
    Failed,
    Message,
    Prefill,
    PrefillDone,
    Reading,
    ReleaseKV,
    Status,
    Tokens,
)
from actors.wire.sockets import connect, listen
from benchmarks.chaos.hosted import AGENT, START_S, Hosted
from benchmarks.mfs.engines import SECRET, Sizes
from benchmarks.mfs.link import Pair
from policies.request.attempts import attempt_id_of

LENDER, READER = "prefill-0", "decode-0"
ENGINES = (LENDER, READER)
LEASE_S = 12
"""Seconds of a lease: longer than a cut and a read take together."""

TIMEOUT_S = 60.0
SIZES = Sizes(
    decodes=1, slots=4, lease_s=LEASE_S, prefill_kv_gib=1.0, decode_kv_gib=1.0, read_timeout_s=TIMEOUT_S
)
PARAMS = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Lost:
    """A task ended with its engine."""

    code: str = "engine_lost"


@dataclass(eq=False)
class Attempt:
    """A prompt on its way through both engines."""

    attempt_id: str
    tokens: list[int]
    prefilled: "asyncio.Future[PrefillDone | Failed | Lost]"
    reading: "asyncio.Future[None]"
    ended: "asyncio.Future[list[int] | Failed | Lost]"
    ids: list[int] = field(default_factory=list)
    first_s: float | None = None
    admitted: Admitted | None = None


class TwoHosts(Hosted):
    """The processes and the client. `begin` starts a process, `ready` waits for an engine."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        super().__init__(pair, folder, SIZES)
        self._me = Identity("ingress", "reads", SECRET.encode())
        self._channels: dict[str, Channel] = {}
        self._attempts: dict[str, Attempt] = {}
        self._numbers = itertools.count(1)
        self._router: asyncio.Server | None = None
        self.statuses: dict[str, tuple[float, Status]] = {}
        """The latest report of each engine, and when it came."""

    # ------------------------------------------------------------------------------------------------ processes

    async def start(self) -> None:
        """Starts everything, and waits until it serves. Raises StartError."""
        router = Identity("router", "router-reads", SECRET.encode())
        self._router, _ = await listen(self.address("router"), lambda: Channel(router, self._on_report), None)
        for name in (AGENT, *ENGINES):
            self.begin(name)
        for name in ENGINES:
            await self.ready(name)

    async def stop(self) -> None:
        """Ends all processes."""
        for channel in list(self._channels.values()):
            channel.close()
        if self._router is not None:
            self._router.close()
        await self.end()

    def options(self, name: str) -> dict[str, Any]:
        return super().options(name) | {"engine_args": {"enable_prefix_caching": False}}

    async def ready(self, name: str) -> None:
        """Waits until an engine serves, and connects to it. Raises StartError."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self.runs(name):
            with contextlib.suppress(ConnectionError, WireError):
                channel = await connect(
                    (self.address(name),),
                    lambda: Channel(self._me, self._on_message, on_close=self._on_close),
                )
                self._channels[name] = channel
                return
            await asyncio.sleep(0.3)
        raise self.no_start(name)

    # ------------------------------------------------------------------------------------------------- requests

    def prefill(self, tokens: Sequence[int]) -> Attempt:
        """Sends a prompt to the prefill engine."""
        loop = asyncio.get_running_loop()
        # engines take what stands before the number for the request's id
        name = attempt_id_of(f"read{next(self._numbers)}", 0)
        made = Attempt(name, list(tokens), loop.create_future(), loop.create_future(), loop.create_future())
        self._attempts[name] = made
        self._send(LENDER, made, Prefill(name, made.tokens, PARAMS, TIMEOUT_S))
        return made

    def decode(self, attempt: Attempt, handle: bytes) -> None:
        """Sends an attempt to the decode engine, with the handle of its KV."""
        self._send(READER, attempt, Decode(attempt.attempt_id, attempt.tokens, PARAMS, handle, TIMEOUT_S))

    def release(self, attempt: Attempt) -> None:
        """Gives an attempt's lease back; without one nothing happens."""
        if (channel := self._channels.get(LENDER)) is not None:
            channel.send(ReleaseKV(attempt.attempt_id))

    async def whole(self, tokens: Sequence[int]) -> list[int] | Failed | Lost:
        """Sends a prompt through both engines, and returns the ids of its answer or why there is none."""
        attempt = self.prefill(tokens)
        done = await attempt.prefilled
        if not isinstance(done, PrefillDone):
            return done
        self.decode(attempt, done.handle)
        return await self.answer(attempt)

    async def answer(self, attempt: Attempt) -> list[int] | Failed | Lost:
        """Returns what an attempt ended with. The lease of one that failed is given back, as an ingress does."""
        found = await attempt.ended
        if not isinstance(found, list):
            self.release(attempt)
        return found

    def _send(self, name: str, attempt: Attempt, message: Message) -> None:
        channel = self._channels.get(name)
        if channel is None:
            self._end(attempt, Lost("not_connected"))
        else:
            channel.send(message)

    def _end(self, attempt: Attempt, how: list[int] | Failed | Lost) -> None:
        self._attempts.pop(attempt.attempt_id, None)
        if not attempt.prefilled.done() and not isinstance(how, list):
            attempt.prefilled.set_result(how)
        if not attempt.reading.done():
            attempt.reading.set_result(None)
        if not attempt.ended.done():
            attempt.ended.set_result(how)

    def _on_message(self, channel: Channel, message: Message) -> None:
        if isinstance(message, Tokens):
            for out in message.items:
                if (attempt := self._attempts.get(out.attempt_id)) is not None:
                    attempt.first_s = attempt.first_s or time.monotonic()
                    attempt.ids += out.token_ids or []
                    if out.finish is not None:
                        self._end(attempt, attempt.ids)
            return
        attempt = self._attempts.get(getattr(message, "attempt_id", ""))
        match message:
            case PrefillDone() if attempt is not None and not attempt.prefilled.done():
                attempt.prefilled.set_result(message)
            case Reading() if attempt is not None and not attempt.reading.done():
                attempt.reading.set_result(None)
            case Admitted() if attempt is not None:
                attempt.admitted = message
            case Failed() if attempt is not None:
                self._end(attempt, message)

    def _on_close(self, channel: Channel, reason: str) -> None:
        """Ends what is under way: with the reader's connection its reads, with the lender's its prompts."""
        name = next((name for name, known in self._channels.items() if known is channel), None)
        if name is None:
            return
        del self._channels[name]
        for attempt in list(self._attempts.values()):
            if not (name == LENDER and attempt.prefilled.done()):
                self._end(attempt, Lost())

    def _on_report(self, channel: Channel, message: Any) -> None:
        if isinstance(message, Status):
            self.statuses[message.engine_id] = (time.monotonic(), message)
        elif not isinstance(message, Announce):
            raise TypeError(f"an engine reports {message!r}")
