"""A channel is one framed connection that carries many messages in one write and needs no task for a message.

A frame (`actors.wire.frames`) is a length and an array of tagged messages. `send` only appends to an outbox, which is
flushed at the end of the event-loop iteration, so the messages of a moment leave in one system call. In an iteration
that works on a burst, what has waited for `HOLD_S` leaves with the next message if the peer has read all before, so
that it begins with the first requests of the burst while this process works on the others. A peer that is behind could
begin nothing; it gets more at once, which costs both less.
Received messages are passed to a synchronous callback. Sharing writes brings the CPU time of a message down to 0.02 ms
(measured with many messages in one write; `docs/design.md`).

Both sides of an open channel send a Ping each second. A peer from which nothing at all came for `SILENT_S`, or that
read nothing for as long, is lost: it is stopped, or its host or the network is away, without the end of the connection
that a process leaves behind when it dies. Only time counts for which our own loop ran (`actors.loop_timeout`), so a
process that was stopped does not take its peers for lost.

Every failure (peer gone, garbage, an oversized frame, silence) ends in exactly one call of `on_close(channel, reason)`,
in which the owner gives back everything bound to the connection.
"""

import asyncio
import hmac
import logging
import math
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.loop_timeout import LoopTicks, LoopTimeout, Silence
from actors.wire.frames import DECODER, ENCODER, GARBAGE, HEADER, PeerKind, proof
from actors.wire.messages import PROTOCOL_VERSION, Hello, Message, Ping, Prove
from actors.wire.tcp import keep_alive, queued_bytes
from actors.wire.tls import WireTls
from actors.wire.unix import stranger

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 256 * 2**20
"""Longest frame that is accepted. A prompt of 1M tokens takes 5 MB, so a longer frame is garbage or an attack."""
MAX_FRAME_BEFORE_HELLO_BYTES = 64 * 2**10
"""Longest frame that is accepted before the handshake is done; a Hello and a Prove take some hundred bytes."""
FRAME_BYTES = 8 * 2**20
"""Length above which a batch of messages is sent as several frames, so that other connections get their turn between
them: the prompts in one such frame take 0.05 s to write and 0.3 s to read (2 busy cores of the development machine)."""
HOLD_S = 0.0002
"""Seconds for which a message waits for others that leave with it, and between two looks whether the peer has read all
before. ASSUMPTION: a write costs some 0.01 ms at both ends together, a twentieth of it; a router decides three messages
in this time."""
MAX_OUTBOX_BYTES = 256 * 2**20
"""Most bytes that may wait unsent. A connection whose peer is further behind is dropped."""
HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds for a peer that has accepted the connection to complete the handshake. ASSUMPTION: a process that needs
longer than twice `SILENT_S` would be lost anyway."""
PING_S = 1.0
SILENT_PINGS = 3
"""Pings of the peer in a row that may be missing before it is lost, which is 3 to 4 s after its last byte. A process
that runs at all sends one each second: two could be late on a busy machine. A stream that stood still behind a silent
engine should go on within 6 s, and needs up to 2 s of them for its prompt, its transfer and its first step elsewhere.
"""
SILENT_S = SILENT_PINGS * PING_S
QUIET_PINGS = 2
"""Pings that are missing when a connection ends from which the peer was quiet before. A process that is killed has sent
its last one at most a period before; one that was cut off, and gave its peer up first, has not.
"""
GIVEN_UP_PINGS = SILENT_PINGS - 2
"""Periods by which a late ping of ours may mean that peers have given this process up: they wait for `SILENT_PINGS`
from the ping before, and this process may have stopped just before the late one was due.
"""

_OURS = frozenset((Hello, Prove, Ping))
"""Types of the messages that a channel handles itself."""


class WireError(Exception):
    """The peer broke the protocol (version, authentication, framing). The message says how; the connection is
    closed.
    """


@dataclass(slots=True)
class Generations:
    """The highest generation of a router that a process has heard of, on any of its connections. 0: of none."""

    highest: int = 0

    def heard(self, generation: int) -> None:
        """Takes in a generation that a peer knows."""
        self.highest = max(self.highest, generation)


@dataclass(frozen=True, slots=True)
class Identity:
    """Kind and name of a process on the wire. With a `secret` the peer must prove that it knows it too. With `tls` its
    connections over TCP are encrypted, and the peer must have a certificate of the same authority.

    A router has a `generation`, higher than that of each router before it. Its peers tell one another of it, and leave
    a router that is not the latest. 0 stands for an unknown generation, and such a router is left alone. Generations of
    autoscalers are numbered apart; only the router looks at them.
    """

    kind: PeerKind
    id: str
    secret: bytes | None = field(default=None, repr=False)
    generation: int = 0
    generations: Generations = field(default_factory=Generations, compare=False, repr=False)
    tls: WireTls | None = field(default=None, compare=False, repr=False)


class Channel(asyncio.Protocol):
    """One connection, during its handshake and after it. The owner passes the callbacks to the constructor.

    `on_open(channel)` runs when the handshake is done, and `on_message(channel, message)` for each message after it.
    `on_close(channel, reason)` runs exactly once, also if the handshake failed. `broken` then says whether the
    connection ended because of a message: its kind was unknown, its shape was wrong, or its handler failed. `silent`
    says whether it ended because the peer was silent or read nothing, and `stood_still` whether this process had stood
    still shortly before, long enough for the peer to have lost it and not it the peer. `quiet_s` is for how long
    nothing had come from the peer when the connection ended, in whole pings, from `QUIET_PINGS` of them on; 0 for less.
    """

    def __init__(
        self,
        me: Identity,
        on_message: Callable[["Channel", Message], None],
        on_open: Callable[["Channel"], None] | None = None,
        on_close: Callable[["Channel", str], None] | None = None,
    ) -> None:
        self.me = me
        self.peer: Hello | None = None
        self.open = False
        self.broken = False
        self.silent = False
        self.quiet_s = 0.0
        self.stood_still = False
        self._on_message = on_message
        self._on_open = on_open
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._outbox: list[Message] = []
        self._flush_scheduled = False
        # when the first message of the outbox was queued, or when the peer was found to be behind
        self._queued_s = 0.0
        self._nonce = secrets.token_bytes(16)
        self._peer_proved = me.secret is None
        self._close_reason: str | None = None
        self._closed = False
        self._handshake_timer: LoopTimeout | None = None
        self._pings: LoopTicks | None = None
        # when the loop went on after it had stood still
        self._awake_s = -math.inf
        self._peer = Silence(SILENT_PINGS)  # what the peer sends
        self._reader = Silence(SILENT_PINGS)  # what the peer reads
        self._written_bytes = self._read_bytes = 0  # of what we sent
        self.closed: asyncio.Future[str] = self._loop.create_future()
        self.opened: asyncio.Future[None] = self._loop.create_future()

    # ------------------------------------------------------------------------------------------------- sending

    def send(self, message: Message) -> None:
        """Queues one message, which leaves together with all others that are queued in this loop iteration, or within
        `HOLD_S` of it. Does nothing on a closed channel.
        """
        if self._closed:
            return
        outbox = self._outbox
        outbox.append(message)
        if len(outbox) == 1:
            self._queued_s = time.monotonic()
            if not self._flush_scheduled:
                self._flush_scheduled = True
                self._loop.call_soon(self._end_of_iteration)
        elif self.open and (now_s := time.monotonic()) - self._queued_s > HOLD_S:
            if self._is_read():
                self._flush()
            else:
                self._queued_s = now_s

    def _end_of_iteration(self) -> None:
        self._flush_scheduled = False
        self._flush()

    def _flush(self) -> None:
        if not self.open or self._close_reason is not None or not self._outbox:
            # messages are kept until the handshake is done, and dropped when the channel closes
            return
        batch, self._outbox = self._outbox, []
        self._write(batch)

    def _write(self, batch: list[Message]) -> None:
        assert self._transport is not None
        try:
            body = ENCODER.encode(batch)
        except (OverflowError, TypeError, ValueError):
            # a bug: the sender should have refused it; the others of the batch leave all the same
            if len(batch) > 1:
                for message in batch:
                    self._write([message])
            else:
                log.exception("%s cannot be encoded and is not sent", type(batch[0]).__name__)
            return
        if len(body) > FRAME_BYTES and len(batch) > 1:
            step = -(-len(batch) // -(-len(body) // FRAME_BYTES))
            for first in range(0, len(batch), step):
                self._write(batch[first : first + step])
            return
        if len(body) > MAX_FRAME_BYTES:
            log.error("%s is over the limit of a frame", type(batch[0]).__name__)
            self.abort(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
            return
        self._transport.write(HEADER.pack(len(body)) + body)
        self._written_bytes += HEADER.size + len(body)
        if self._transport.get_write_buffer_size() > MAX_OUTBOX_BYTES:
            self.abort("peer does not read: outbox over its limit")

    def _is_read(self) -> bool:
        """Returns whether the peer has read all that was written; over TCP, whether its kernel has got it."""
        transport = self._transport
        return transport is not None and not transport.get_write_buffer_size() and not queued_bytes(transport)

    def unread_bytes(self) -> int:
        """Returns the number of written bytes that wait for the peer to read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self, reason: str = "closed by us") -> None:
        """Sends what is queued, then closes the connection; `on_close` gets `reason`."""
        self._flush()
        self._close_reason = self._close_reason or reason
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Drops the connection at once, with what is queued; `on_close` gets `reason`."""
        self._close_reason = self._close_reason or reason
        if self._transport is not None:
            self._transport.abort()

    def lose(self, reason: str) -> None:
        """Drops the connection to a peer that gives no sign of life; `on_close` gets `reason`."""
        self.silent = True
        self.abort(reason)

    # ---------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # asyncio hands stream protocols a Transport
        # the owner may have closed this channel before it was connected
        if self._close_reason is not None:
            transport.abort()  # type: ignore[attr-defined]
            return
        connection = transport.get_extra_info("socket")
        if (user := stranger(connection)) is not None:
            self.abort(f"the peer is a process of user {user}, and this one runs as {os.geteuid()}")
            return
        keep_alive(connection)
        self._handshake_timer = LoopTimeout(HANDSHAKE_TIMEOUT_S, self._handshake_timeout)
        self._write([Hello(PROTOCOL_VERSION, self.me.kind, self.me.id, self._nonce, self.me.generation)])

    def data_received(self, data: bytes) -> None:
        self._peer.heard = True
        if self._is_closing():
            return
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= 4:
                (size,) = HEADER.unpack_from(buffer, start)
                if size > (MAX_FRAME_BYTES if self.open else MAX_FRAME_BEFORE_HELLO_BYTES):
                    raise WireError(f"frame of {size} bytes is over the limit")
                if len(buffer) - start - 4 < size:
                    break
                with memoryview(buffer) as view:
                    messages = _decoded(view[start + 4 : start + 4 + size])
                start += 4 + size
                self._deliver(messages)
                if self._is_closing():
                    return
        except WireError as error:
            self.broken = True
            self.abort(f"protocol error from {self.peer_name}: {error}")
            return
        if start:
            del buffer[:start]

    def _is_closing(self) -> bool:
        return self._close_reason is not None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closed:
            return
        self._closed, self.open = True, False
        if self._pings is not None and (
            self._pings.late_s() >= GIVEN_UP_PINGS * PING_S or self._awake_since_s() < PING_S
        ):
            self.stood_still = True
        if self.silent:
            self.quiet_s = SILENT_S
        elif self._peer.missed >= QUIET_PINGS:
            self.quiet_s = self._peer.missed * PING_S
        for timer in (self._handshake_timer, self._pings):
            if timer is not None:
                timer.cancel()
        reason = self._close_reason = self._close_reason or (
            f"connection lost: {exc}" if exc else "closed by peer"
        )
        self.closed.set_result(reason)
        if not self.opened.done():
            self.opened.set_exception(WireError(reason))
            # marks the exception as retrieved: nobody may be waiting
            self.opened.exception()
        if self._on_close is not None:
            self._on_close(self, reason)

    # ----------------------------------------------------------------------------------------------- handshake

    @property
    def peer_name(self) -> str:
        return f"{self.peer.kind} {self.peer.id}" if self.peer else "unknown peer"

    def _deliver(self, messages: list[Message]) -> None:
        for message in messages:
            if self._close_reason is not None:
                # the handler of an earlier message of this frame has closed the channel
                return
            if type(message) in _OURS:
                self._heard(message)
            elif self.open:
                try:
                    self._on_message(self, message)
                except WireError:
                    raise  # the handler does not take it
                except Exception:
                    log.exception("handler failed on %s from %s", type(message).__name__, self.peer_name)
                    raise WireError(f"handler failed on {type(message).__name__}") from None
            else:
                raise WireError(f"{type(message).__name__} before the handshake")

    def _heard(self, message: Message) -> None:
        if not isinstance(message, Ping):
            assert isinstance(message, (Hello, Prove))
            self._handshake(message)
        elif self.open:
            self.me.generations.heard(message.generation)
        else:
            raise WireError("Ping before the handshake")

    def _handshake(self, message: Hello | Prove) -> None:
        if self.open:
            hint = " (it has a shared secret, we have none)" if isinstance(message, Prove) else ""
            raise WireError(f"{type(message).__name__} after the handshake{hint}")
        if isinstance(message, Hello):
            if self.peer is not None:
                raise WireError("a second Hello")
            if message.version != PROTOCOL_VERSION:
                raise WireError(
                    f"speaks protocol {message.version}, we speak {PROTOCOL_VERSION}: upgrade the older side"
                )
            self.peer = message
            if self._is_outdated():
                return
            if self.me.secret is not None:
                if (message.kind, message.id) == (self.me.kind, self.me.id):
                    # a peer with our own name could send our own proof back to us
                    raise WireError("claims to be ourselves")
                me = self.me
                self._write(
                    [Prove(proof(self.me.secret, message.nonce, self._nonce, me.kind, me.id, message.id))]
                )
        elif isinstance(message, Prove) and self.peer is not None and self.me.secret is not None:
            peer = self.peer
            expected = proof(self.me.secret, self._nonce, peer.nonce, peer.kind, peer.id, self.me.id)
            if not hmac.compare_digest(message.mac, expected):
                raise WireError("wrong shared secret (SLUICE_WIRE_SECRET must be the same on all nodes)")
            self._peer_proved = True
        else:
            raise WireError("Prove out of order")
        if self.peer is not None and self._peer_proved:
            # an autoscaler has generations of its own
            if self.peer.kind == "router":
                self.me.generations.heard(self.peer.generation)
            self._established()

    def _established(self) -> None:
        self.open = True
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        # the future is cancelled if the task that waited for it was
        if not self.opened.done():
            self.opened.set_result(None)
        if self._on_open is not None:
            self._on_open(self)
        self._pings = LoopTicks(PING_S, self._ping)
        self._flush()

    # -------------------------------------------------------------------------------------------------- silence

    def _awake_since_s(self) -> float:
        return self._loop.time() - self._awake_s

    def _ping(self, lived: bool) -> None:
        """Runs each second of an open channel, also while what is queued leaves a closed one."""
        assert self._transport is not None
        if self._pings is not None and self._pings.was_late_s >= GIVEN_UP_PINGS * PING_S:
            self._awake_s = self._loop.time()
        unread_bytes = self._transport.get_write_buffer_size()
        # a slow reader of TCP frees our buffer in lumps of a third of the kernel's queue, which is megabytes
        read_bytes = self._written_bytes - unread_bytes - queued_bytes(self._transport)
        self._reader.heard = not unread_bytes or read_bytes > self._read_bytes
        self._read_bytes = read_bytes
        if self._peer.tick(lived):
            self.lose(f"{self.peer_name} was silent for {SILENT_S:g} s")
        elif self._reader.tick(lived):
            self.lose(f"{self.peer_name} read nothing for {SILENT_S:g} s, {unread_bytes} bytes wait")
        elif not self._is_closing() and not self._is_outdated():
            self.send(Ping(self.me.generations.highest))

    def _is_outdated(self) -> bool:
        """Whether the peer is a router of an earlier generation than another that is known; if so, the channel ends."""
        assert self.peer is not None
        peer, latest = self.peer, self.me.generations.highest
        outdated = peer.kind == "router" and 0 < peer.generation < latest
        if outdated:
            self.abort(f"router {peer.id} of generation {peer.generation} was replaced by one of {latest}")
        return outdated

    def _handshake_timeout(self) -> None:
        if not self.open:
            self.abort(f"no handshake within {HANDSHAKE_TIMEOUT_S:.0f} s")


def _decoded(data: memoryview) -> list[Message]:
    try:
        return DECODER.decode(data)
    except GARBAGE as error:
        raise WireError(str(error)) from None
