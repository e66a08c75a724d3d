"""A channel is one framed connection that carries many messages in one write and needs no task for a message.

A frame is a 4-byte big-endian length and a msgpack array of tagged messages. `send` only appends to an outbox, which is
flushed once per event-loop iteration, so a burst of tokens or decisions leaves in one system call. Received messages
are passed to a synchronous callback. Sharing writes brings the CPU time of a message down to 0.02 ms (measured with
many messages in one write; `docs/design.md`).

Every failure (peer gone, garbage, an oversized frame, an outbox that the peer does not drain) ends in exactly one call
of `on_close(channel, reason)`, in which the owner gives back everything bound to the connection.
"""

import asyncio
import errno
import hmac
import logging
import os
import secrets
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from actors.loop_timeout import LoopTimeout
from actors.wire.messages import PROTOCOL_VERSION, Hello, Message, Prove

log = logging.getLogger(__name__)

_HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 256 * 2**20
"""Longest frame that is accepted. A prompt of 1M tokens takes 5 MB, so a longer frame is garbage or an attack."""
MAX_FRAME_BEFORE_HELLO_BYTES = 64 * 2**10
"""Longest frame that is accepted before the handshake is done; a Hello and a Prove take some hundred bytes."""
MAX_OUTBOX_BYTES = 256 * 2**20
"""Most bytes that may wait unsent. A connection whose peer is further behind is dropped."""
HANDSHAKE_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 20.0
"""Seconds for one attempt to connect to an address; TCP alone would try a node that is gone for two minutes."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])

PeerKind = Literal["ingress", "router", "engine"]


class WireError(Exception):
    """The peer broke the protocol (version, authentication, framing). The message says how; the connection is
    closed.
    """


@dataclass(frozen=True, slots=True)
class Identity:
    """Kind and name of a process on the wire. With a `secret` the peer must prove that it knows it too."""

    kind: PeerKind
    id: str
    secret: bytes | None = None


class Channel(asyncio.Protocol):
    """One connection, during its handshake and after it. The owner passes the callbacks to the constructor.

    `on_open(channel)` runs when the handshake is done, and `on_message(channel, message)` for each message after it.
    `on_close(channel, reason)` runs exactly once, also if the handshake failed. `broken` then says whether the
    connection ended because of a message: its kind was unknown, its shape was wrong, or its handler failed.
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
        self._on_message = on_message
        self._on_open = on_open
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._outbox: list[Message] = []
        self._flush_scheduled = False
        self._nonce = secrets.token_bytes(16)
        self._peer_proved = me.secret is None
        self._close_reason: str | None = None
        self._closed = False
        self._handshake_timer: LoopTimeout | None = None
        self.closed: asyncio.Future[str] = self._loop.create_future()
        self.opened: asyncio.Future[None] = self._loop.create_future()

    # ------------------------------------------------------------------------------------------------- sending

    def send(self, message: Message) -> None:
        """Queues one message, which leaves together with all others queued in this loop iteration. Does nothing on a
        closed channel.
        """
        if self._closed:
            return
        self._outbox.append(message)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if not self.open or self._close_reason is not None or not self._outbox:
            # messages are kept until the handshake is done, and dropped when the channel closes
            return
        batch, self._outbox = self._outbox, []
        self._write(batch)

    def _write(self, batch: list[Message]) -> None:
        assert self._transport is not None
        body = _encoder.encode(batch)
        self._transport.write(_HEADER.pack(len(body)) + body)
        if self._transport.get_write_buffer_size() > MAX_OUTBOX_BYTES:
            self.abort("peer does not read: outbox over its limit")

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

    # ---------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # asyncio hands stream protocols a Transport
        # the owner may have closed this channel before it was connected
        if self._close_reason is not None:
            transport.abort()  # type: ignore[attr-defined]
            return
        self._handshake_timer = LoopTimeout(HANDSHAKE_TIMEOUT_S, self._handshake_timeout)
        self._write([Hello(PROTOCOL_VERSION, self.me.kind, self.me.id, self._nonce)])

    def data_received(self, data: bytes) -> None:
        if self._is_closing():
            return
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= 4:
                (size,) = _HEADER.unpack_from(buffer, start)
                if size > (MAX_FRAME_BYTES if self.open else MAX_FRAME_BEFORE_HELLO_BYTES):
                    raise WireError(f"frame of {size} bytes is over the limit")
                if len(buffer) - start - 4 < size:
                    break
                with memoryview(buffer) as view:
                    messages = _decoder.decode(view[start + 4 : start + 4 + size])
                start += 4 + size
                self._deliver(messages)
                if self._is_closing():
                    return
        except (WireError, msgspec.DecodeError, msgspec.ValidationError) as error:
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
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
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
            if self._is_closing():
                # the handler of an earlier message of this frame has closed the channel
                return
            if isinstance(message, (Hello, Prove)):
                self._handshake(message)
            elif self.open:
                try:
                    self._on_message(self, message)
                except Exception:
                    log.exception("handler failed on %s from %s", type(message).__name__, self.peer_name)
                    raise WireError(f"handler failed on {type(message).__name__}") from None
            else:
                raise WireError(f"{type(message).__name__} before the handshake")

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
            if self.me.secret is not None:
                if (message.kind, message.id) == (self.me.kind, self.me.id):
                    # a peer with our own name could send our own proof back to us
                    raise WireError("claims to be ourselves")
                self._write([Prove(_mac(self.me.secret, message.nonce, self._nonce, self.me, message.id))])
        elif isinstance(message, Prove) and self.peer is not None and self.me.secret is not None:
            peer = Identity(self.peer.kind, self.peer.id)
            expected = _mac(self.me.secret, self._nonce, self.peer.nonce, peer, self.me.id)
            if not hmac.compare_digest(message.mac, expected):
                raise WireError("wrong shared secret (SLUICE_WIRE_SECRET must be the same on all nodes)")
            self._peer_proved = True
        else:
            raise WireError("Prove out of order")
        if self.peer is not None and self._peer_proved:
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
        self._flush()

    def _handshake_timeout(self) -> None:
        if not self.open:
            self.abort(f"no handshake within {HANDSHAKE_TIMEOUT_S:.0f} s")


def _mac(secret: bytes, peer_nonce: bytes, own_nonce: bytes, who: Identity, peer_id: str) -> bytes:
    """Returns the MAC by which `who` proves to `peer_id` that it knows the secret. The MAC covers both nonces and both
    names, so that it is worthless in any other connection.
    """
    parts = (peer_nonce, own_nonce, who.kind.encode(), who.id.encode(), peer_id.encode())
    return hmac.new(secret, b"".join(_HEADER.pack(len(part)) + part for part in parts), "sha256").digest()


# ------------------------------------------------------------------------------------------------ listen and connect


async def listen(address: str, factory: Callable[[], Channel]) -> tuple[asyncio.Server, str]:
    """Starts to listen on `unix:/path`, `tcp:host:port` (port 0 picks a free one) or `tcp:host:first-last`, which takes
    the first free port of a range. Returns the server and the address at which it listens. Raises OSError if no such
    port is free.
    """
    loop = asyncio.get_running_loop()
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        _clear_for_socket(rest)
        server = await loop.create_unix_server(factory, rest)
        os.chmod(rest, 0o600)
        return server, address
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        server = await _listen_in_range(factory, host, port)
        bound = server.sockets[0].getsockname()
        return server, f"tcp:{host}:{bound[1]}"
    raise ValueError(f"address {address!r}: expected unix:/path or tcp:host:port")


async def _listen_in_range(factory: Callable[[], Channel], host: str, ports: str) -> asyncio.Server:
    first, last = port_range(ports)
    for port in range(first, last + 1):
        try:
            return await asyncio.get_running_loop().create_server(factory, host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or first == last:
                raise
    raise OSError(errno.EADDRINUSE, f"all ports {ports} of {host} are in use: make the range longer")


def port_range(ports: str) -> tuple[int, int]:
    """Returns the first and the last port of `first-last`, or twice the only one."""
    first, _, last = ports.partition("-")
    return int(first), int(last or first)


def remove_sockets(addresses: Iterable[str]) -> None:
    """Removes the files of the unix sockets among `addresses`, after their listeners have closed."""
    for address in addresses:
        if address.startswith("unix:"):
            Path(address.removeprefix("unix:")).unlink(missing_ok=True)


def _clear_for_socket(path: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    if os.path.exists(path):
        # a killed process left this file; socket paths carry a fresh id, so no other process listens here
        os.unlink(path)


async def connect(addresses: tuple[str, ...], factory: Callable[[], Channel]) -> Channel:
    """Connects to the first of `addresses` that answers, completes the handshake, and returns the channel. (The unix
    path of another node does not exist here, so it fails at once.)

    Raises ConnectionError that names every address tried, or WireError if the handshake fails.
    """
    loop = asyncio.get_running_loop()
    errors: list[str] = []
    for address in addresses:
        scheme, _, rest = address.partition(":")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if scheme == "unix":
                    _, channel = await loop.create_unix_connection(factory, rest)
                else:
                    host, _, port = rest.rpartition(":")
                    _, channel = await loop.create_connection(factory, host, int(port))
        except TimeoutError:
            errors.append(f"{address}: not connected within {CONNECT_TIMEOUT_S:g} s")
            continue
        except OSError as error:
            errors.append(f"{address}: {error}")
            continue
        try:
            await channel.opened
        except asyncio.CancelledError:
            channel.abort("the attempt to connect was given up")
            raise
        return channel
    raise ConnectionError("no address answers: " + "; ".join(errors))
