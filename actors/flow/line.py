"""A line from a thread to its node's agent: one connection without an event loop, on a non-blocking socket.

`Line.pump` does all the work: it connects, repeats that with back-off when it fails, completes the handshake, pings,
and returns what happened since the last call. It never blocks, so a stopped agent does not hold the thread up.
"""

import errno
import os
import secrets
import select
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from actors.wire.channel import MAX_FRAME_BYTES, MAX_OUTBOX_BYTES, PING_S, SILENT_S, WireError
from actors.wire.frames import DECODER, ENCODER, GARBAGE, HEADER, proof
from actors.wire.messages import PROTOCOL_VERSION, Hello, Message, Ping, Prove
from actors.wire.unix import stranger

RETRY_FIRST_S = 0.02
RETRY_MOST_S = 1.0
READ_BYTES = 2**16


class Turn(Enum):
    """The events of a line beside its messages: its handshake is done, or its connection has ended."""

    UP = auto()
    DOWN = auto()


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end: its `address` (`unix:/path` or `tcp:host:port`), our id, and the shared secret."""

    address: str
    me: str
    secret: bytes | None = None


class Line:
    """One connection to an agent at a time. All calls come from one thread; times are on that thread's clock."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._socket: socket.socket | None = None
        self._connecting = False
        self._hello: Hello | None = None
        self._proved = False
        self.up = False
        self.reason = ""
        """Why the last connection ended."""
        self._in, self._out = bytearray(), bytearray()
        self._nonce = b""
        self._retry_s, self._retry_at_s = RETRY_FIRST_S, 0.0
        self._ping_at_s = 0.0
        self._heard_s = 0.0

    def fileno(self) -> int | None:
        """Returns the descriptor to wait on, or None without a socket."""
        return None if self._socket is None else self._socket.fileno()

    def send(self, messages: Sequence[Message]) -> None:
        """Sends messages in one frame. Does nothing while the line is not up."""
        if self.up and messages:
            self._queue(messages)

    def flush(self) -> None:
        """Writes what is queued as far as the socket takes it; an error shows at the next `pump`."""
        try:
            self._write()
        except (OSError, WireError):
            pass

    def pump(self, now_s: float, lived_s: float) -> list[Turn | Message]:
        """Connects, writes and reads as far as that is possible at once. Returns the turns and messages in order. The
        thread itself ran for `lived_s` since the last call.
        """
        happened: list[Turn | Message] = []
        try:
            if self._socket is None and now_s >= self._retry_at_s:
                self._connect(now_s)
            if self._socket is not None:
                self._write()
                self._read(now_s, happened)
                self._stay(now_s, lived_s)
                self._write()
        except (OSError, ValueError, WireError, *GARBAGE) as error:
            self._drop(str(error), now_s, happened)
        return happened

    def wait(self, timeout_s: float, *also: int) -> None:
        """Waits until the agent has sent something, one of the descriptors `also` is readable, or time is up."""
        own = self.fileno()
        watched = dict.fromkeys(also, select.POLLIN)
        if own is not None:
            watched[own] = select.POLLIN | (select.POLLOUT if self._connecting or self._out else 0)
        wait_readable(watched, timeout_s)

    def close(self) -> None:
        """Closes the connection. The line may be used again, and then connects anew."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self.up = None, False

    # ------------------------------------------------------------------------------------------------ connecting

    def _connect(self, now_s: float) -> None:
        scheme, _, rest = self._peer.address.partition(":")
        if scheme == "unix":
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            where: str | tuple[str, int] = rest
        else:
            host, _, port = rest.rpartition(":")
            self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            where = (host, int(port))
        self._socket.setblocking(False)
        self._in, self._out = bytearray(), bytearray()
        self._hello, self._proved = None, self._peer.secret is None
        self._nonce = secrets.token_bytes(16)
        self._heard_s = 0.0
        failed = self._socket.connect_ex(where)
        if not failed and (user := stranger(self._socket)) is not None:
            raise WireError(f"{self._peer.address} is a socket of user {user}")
        self._connecting = failed == errno.EINPROGRESS
        if failed and not self._connecting:
            raise OSError(failed, f"{self._peer.address}: {os.strerror(failed)}")
        self._queue([Hello(PROTOCOL_VERSION, "worker", self._peer.me, self._nonce)])

    def _drop(self, reason: str, now_s: float, happened: list[Turn | Message]) -> None:
        if self.up:
            happened.append(Turn.DOWN)
            self._retry_s = RETRY_FIRST_S
        self.reason = reason
        self.close()
        self._retry_at_s = now_s + self._retry_s
        self._retry_s = min(RETRY_MOST_S, 2 * self._retry_s)

    def _handshake(self, message: Message, now_s: float) -> bool:
        """Takes a message before the line is up, and returns whether it is up now."""
        secret = self._peer.secret
        if isinstance(message, Hello) and self._hello is None:
            if message.version != PROTOCOL_VERSION:
                raise WireError(f"the agent speaks protocol {message.version}, we speak {PROTOCOL_VERSION}")
            if message.kind != "agent":
                raise WireError(f"{self._peer.address} is the address of a {message.kind}, not of an agent")
            self._hello = message
            if secret is not None:
                mac = proof(secret, message.nonce, self._nonce, "worker", self._peer.me, message.id)
                self._queue([Prove(mac)])
        elif isinstance(message, Prove) and self._hello is not None and secret is not None:
            hello = self._hello
            if message.mac != proof(secret, self._nonce, hello.nonce, hello.kind, hello.id, self._peer.me):
                raise WireError("wrong shared secret (SLUICE_WIRE_SECRET must be the same on all nodes)")
            self._proved = True
        else:
            raise WireError(f"{type(message).__name__} during the handshake")
        if self._hello is not None and self._proved:
            self.up, self._retry_s = True, RETRY_FIRST_S
            self._ping_at_s = now_s + PING_S
        return self.up

    # --------------------------------------------------------------------------------------------------- traffic

    def _queue(self, messages: Sequence[Message]) -> None:
        body = ENCODER.encode(messages)
        self._out += HEADER.pack(len(body)) + body

    def _write(self) -> None:
        if self._socket is None or not self._out:
            return
        try:
            sent = self._socket.send(self._out)
            # what a socket takes shows that it is connected
            self._connecting = False
        except BlockingIOError:
            sent = 0
        del self._out[:sent]
        if len(self._out) > MAX_OUTBOX_BYTES:
            raise WireError("the agent does not read")

    def _read(self, now_s: float, happened: list[Turn | Message]) -> None:
        assert self._socket is not None
        while True:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.ENOTCONN and self._connecting:
                    return
                raise
            if not data:
                raise WireError("closed by the agent")
            self._heard_s, self._connecting = 0.0, False
            self._in += data
            if len(data) < READ_BYTES:
                break
        self._decode(now_s, happened)

    def _decode(self, now_s: float, happened: list[Turn | Message]) -> None:
        start = 0
        while len(self._in) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(self._in, start)
            if size > MAX_FRAME_BYTES:
                raise WireError(f"frame of {size} bytes is over the limit")
            begin = start + HEADER.size
            if len(self._in) - begin < size:
                break
            start = begin + size
            for message in DECODER.decode(bytes(self._in[begin:start])):
                if self.up:
                    happened.append(message)
                elif self._handshake(message, now_s):
                    happened.append(Turn.UP)
        if start:
            del self._in[:start]

    def _stay(self, now_s: float, lived_s: float) -> None:
        """Pings, and gives a silent agent up. Its silence counts only while this thread runs."""
        self._heard_s += lived_s
        if self._heard_s > SILENT_S:
            raise WireError(f"the agent was silent for {SILENT_S:g} s")
        if self.up and now_s >= self._ping_at_s:
            self._ping_at_s = now_s + PING_S
            self._queue([Ping()])


def wait_readable(watched: Mapping[int, int], timeout_s: float) -> None:
    """Waits until one of the descriptors has one of its events (of `select.poll`), or for `timeout_s`."""
    poll = select.poll()
    for descriptor, events in watched.items():
        poll.register(descriptor, events)
    poll.poll(timeout_s * 1000)
