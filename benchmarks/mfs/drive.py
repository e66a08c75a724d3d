"""The client of one run: it sends each request to its prefill engine, its KV's handle to the decode engine, and notes
when what came.

It stands for ingress and router: it says to the decode engine how long the KV may take, which is what is left of the
TTFT that the request's class is promised, less the time from the KV to the first token. While it `lends`, the first
prefill engine lends the prefix of a request that goes to another one: it computes the prefix and one token more, nearly
all of which it has, and the other engine gets the handle (MFS stage 1). Else the other engine computes all of it.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actors.wire.channel import Channel, Identity
from actors.wire.messages import (
    Admitted,
    Decode,
    Failed,
    Message,
    Prefill,
    PrefillDone,
    Reading,
    ReleaseKV,
    Tokens,
)
from actors.wire.sockets import connect
from benchmarks.mfs.engines import SECRET, Running
from benchmarks.mfs.workload import Arrival, Kind, Workload
from policies.request.attempts import attempt_id_of

TIMEOUT_S = 300.0
PARAMS = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Promise:
    """A class is promised its first token `ttft_s` after arrival, of which `after_kv_s` follow the KV."""

    ttft_s: float
    after_kv_s: float


@dataclass(slots=True)
class Ask:
    """One request and the times of its stages, in seconds on this process's monotonic clock. One that only `fills` a
    cache ends with its prefill.
    """

    arrival: Arrival
    attempt_id: str
    sent_s: float
    fills: bool = False
    lent_s: float | None = None
    prefilled_s: float | None = None
    asked_s: float | None = None
    reading_s: float | None = None
    admitted_s: float | None = None
    first_s: float | None = None
    failed: str | None = None
    bytes: int = 0
    cached_tokens: int = 0
    busy_s: float = 0.0
    held_s: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Client:
    """Connections to the engines of one application, and the requests under way."""

    def __init__(self, engines: Running, workload: Workload, promises: Mapping[Kind, Promise]) -> None:
        self._engines = engines
        self._workload = workload
        self._promises = promises
        self._asks: dict[str, Ask] = {}
        self._prefills: list[Channel] = []
        self._decodes: list[Channel] = []
        self._count = 0
        self.lends = True
        """Whether prefixes are lent. It changes between runs only."""

    async def connect(self) -> None:
        """Connects to all engines. Raises ConnectionError."""
        me = Identity("ingress", "benchmark", SECRET.encode())

        async def channel(address: str) -> Channel:
            return await connect((address,), lambda: Channel(me, self._on_message, on_close=self._on_close))

        self._prefills = [await channel(address) for address in self._engines.prefills]
        self._decodes = [await channel(address) for address in self._engines.decodes]

    def close(self) -> None:
        """Ends the connections; the engines end what is under way."""
        for channel in (*self._prefills, *self._decodes):
            channel.close()

    async def run(self, arrivals: Sequence[Arrival]) -> list[Ask]:
        """Sends each request at its time, whatever became of those before it, and returns all when all have ended."""
        begun_s, asks = time.monotonic(), []
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, begun_s + arrival.at_s - time.monotonic()))
            asks.append(self.send(arrival))
        for ask in asks:
            await ask.ended.wait()
        return asks

    async def fill(self, arrivals: Sequence[Arrival]) -> list[Ask]:
        """Has the first prefill engine compute the prefixes of these requests, and waits until its cache has them."""
        asks = [self._new(arrival, fills=True) for arrival in arrivals]
        for ask in asks:
            self._send(0, ask, self._head(ask, 0))
        for ask in asks:
            await ask.ended.wait()
        return asks

    async def alone(self, arrival: Arrival) -> Ask:
        """Sends one request and waits for its end."""
        ask = self.send(arrival)
        await ask.ended.wait()
        return ask

    def send(self, arrival: Arrival) -> Ask:
        """Sends a request's prompt to its prefill engine, or first its prefix to the one that lends it."""
        ask = self._new(arrival)
        if arrival.prefill and self.lends:
            self._send(0, ask, self._head(ask, 1))
        else:
            self._send(arrival.prefill, ask, self._tokens(ask))
        return ask

    def _new(self, arrival: Arrival, fills: bool = False) -> Ask:
        self._count += 1
        # engines take what stands before the number for the request's id
        ask = Ask(arrival, attempt_id_of(f"{arrival.kind}{self._count}", 0), time.monotonic(), fills)
        self._asks[ask.attempt_id] = ask
        return ask

    def _send(self, engine: int, ask: Ask, tokens: list[int], prefix: bytes | None = None) -> None:
        self._prefills[engine].send(Prefill(ask.attempt_id, tokens, PARAMS, TIMEOUT_S, prefix=prefix))

    def _tokens(self, ask: Ask) -> list[int]:
        return self._workload.prompt(ask.arrival.kind, ask.arrival.prompt)

    def _head(self, ask: Ask, more: int) -> list[int]:
        """Returns the prefix of a request's prompt and as many `more` tokens."""
        return self._tokens(ask)[: self._workload.prefix_tokens(ask.arrival.kind) + more]

    def _on_message(self, channel: Channel, message: Message) -> None:
        now_s = time.monotonic()
        if isinstance(message, Tokens):
            for out in message.items:
                self._on_token(out.attempt_id, out.finish is not None, now_s)
            return
        ask = self._asks.get(getattr(message, "attempt_id", ""))
        match message:
            case PrefillDone() if ask is not None and ask.fills:
                channel.send(ReleaseKV(ask.attempt_id))
                self._end(ask, None)
            case PrefillDone() if ask is not None and channel is not self._prefills[ask.arrival.prefill]:
                ask.lent_s = now_s
                self._send(ask.arrival.prefill, ask, self._tokens(ask), message.handle)
            case PrefillDone() if ask is not None:
                ask.prefilled_s, ask.cached_tokens = now_s, message.cached_tokens
                self._decode(ask, message.handle)
            case Reading() if ask is not None:
                ask.reading_s = now_s
            case Admitted() if ask is not None:
                ask.admitted_s = now_s
                ask.bytes, ask.busy_s, ask.held_s = (
                    message.transfer_bytes,
                    message.transfer_s,
                    message.held_s,
                )
            case Failed() if ask is not None:
                self._end(ask, message.code)

    def _decode(self, ask: Ask, handle: bytes) -> None:
        promise = self._promises.get(ask.arrival.kind)
        ask.asked_s = time.monotonic()
        due_s = None if promise is None else promise.ttft_s - (ask.asked_s - ask.sent_s) - promise.after_kv_s
        channel = self._decodes[ask.arrival.decode]
        channel.send(Decode(ask.attempt_id, self._tokens(ask), PARAMS, handle, TIMEOUT_S, kv_due_s=due_s))

    def _on_token(self, attempt_id: str, finished: bool, now_s: float) -> None:
        ask = self._asks.get(attempt_id)
        if ask is None:
            return
        if ask.first_s is None:
            ask.first_s = now_s
        if finished:
            self._end(ask, None)

    def _end(self, ask: Ask, failed: str | None) -> None:
        ask.failed = failed
        del self._asks[ask.attempt_id]
        ask.ended.set()

    def _on_close(self, channel: Channel, reason: str) -> None:
        """Ends every request: the run is of no use without one of its engines."""
        for ask in list(self._asks.values()):
            self._end(ask, f"connection lost: {reason}")
