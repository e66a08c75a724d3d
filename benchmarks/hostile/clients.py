"""The hostile clients of one kind, in a process of their own.

    python -m benchmarks.hostile.clients idle --port PORT --count 10000 --seconds 45

    slow_readers    ask for long streams and read a byte a second
    half_open       send half a head, or a head and half of its body, and then nothing
    idle            connect and send nothing
    large           ask with 4 MB of text, all at once, and read the answer

All come from one address that nobody else has (127.0.0.2), as the clients of one owner do. They hold what they have for
`--seconds`, or until all of it has ended. Then the process prints one JSON object: `outcomes` counts the connections by
status and end, `most_open` is the largest number of connections that were open at once. The process has a low priority,
because real clients use the cores of other machines.
"""

import argparse
import contextlib
import errno
import json
import os
import resource
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from benchmarks.chaos.http import post_bytes
from benchmarks.live.measure import CHAT, COMPLETIONS

Kind = Literal["slow_readers", "half_open", "idle", "large"]
KINDS: tuple[Kind, ...] = get_args(Kind)

ADDRESS = "127.0.0.2"
NICE = 10
SPARE_FILES = 64
CONNECTING = 256
"""Connections that are being made at a time: more would fill the listening socket's queue and wait for seconds."""
READ_S = 1.0
"""Time between two bytes that a slow reader reads."""
RECEIVE_BYTES = 4096
"""Receive buffer of a slow reader; the kernel doubles it. By default it would take some 100 kB of a stream itself."""
LONG_TOKENS = 4_000
HALF_BODY_BYTES = 512 * 2**10
"""Announced body of a half-open sender, of which half is sent."""
LARGE_TEXT_BYTES = 4_000_000
POLL_S = 0.05

_PREFIX = b"HTTP/1.1 "
_LINE = b"All clients of this server are equal, but some would like to be more equal than others are. "
_IP_BIND_ADDRESS_NO_PORT = 24  # linux/in.h
_CLOSE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class FilesError(RuntimeError):
    """The error of a process that may not open as many files as it needs; its message says what to do."""


def allow_files(needed: int) -> None:
    """Raises the limit on the open files of this process to the highest that it may have.

    Raises FilesError if that is less than `needed`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise FilesError(
            f"{needed} open files are needed, and the hard limit of this process is {hard}: raise it (ulimit -Hn), or "
            "ask for fewer connections"
        )


def requests_of(kind: Kind) -> list[bytes]:
    """Returns the different requests of a kind, which its connections send in turn."""
    if kind == "idle":
        return [b""]
    if kind == "half_open":
        body = {"model": "sim", "max_tokens": 1, "prompt": "x" * HALF_BODY_BYTES}
        whole = post_bytes(COMPLETIONS, body)
        return [whole[: whole.index(b"content-type") + 8], whole[: -HALF_BODY_BYTES // 2]]
    if kind == "large":
        text = (_LINE * (LARGE_TEXT_BYTES // len(_LINE) + 1))[:LARGE_TEXT_BYTES].decode()
        body = {"model": "sim", "max_tokens": 2, "prompt": text}
        return [post_bytes(COMPLETIONS, body, connection="close")]
    messages = [{"role": "user", "content": "a long story"}]
    body = {"model": "sim", "max_tokens": LONG_TOKENS, "stream": True, "ignore_eos": True}
    return [post_bytes(CHAT, {**body, "messages": messages})]


class Client:
    """One connection. `outcome` is the status of its answer, and how the connection ended."""

    def __init__(self, kind: Kind, port: int, request: bytes) -> None:
        self.slow = kind == "slow_readers"
        self.connected = False
        self._left = memoryview(request)
        self._status = ""
        self._head = b""
        self._end = "open"
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        if self.slow:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        self.socket.bind((ADDRESS, 0))
        self.socket.connect_ex(("127.0.0.1", port))

    @property
    def outcome(self) -> str:
        if not self.connected:
            return "not connected" if self._end == "open" else f"not connected, {self._end}"
        return f"{self._status or 'no answer'}, {self._end}"

    @property
    def ended(self) -> bool:
        return self._end != "open"

    @property
    def mask(self) -> int:
        """The events that this connection waits for."""
        reads = 0 if self.slow and self._status in ("", "200") and self.connected else select.EPOLLIN
        return reads | _CLOSE | (select.EPOLLOUT if self._left or not self.connected else 0)

    def handle(self, events: int) -> None:
        """Sends and receives what it can."""
        try:
            if events & select.EPOLLERR:
                code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                raise OSError(code, os.strerror(code))
            if events & select.EPOLLOUT:
                self.connected = True
                self._send()
            if events & (select.EPOLLIN | select.EPOLLHUP):
                self._receive(1 << 16)
            elif events & select.EPOLLRDHUP:
                self._peek()
                self._close("closed")
        except OSError as error:
            self._failed(error)

    def read_a_byte(self) -> None:
        """Reads one byte, as a slow reader does. The status is known from the bytes that wait."""
        try:
            if not self._status:
                self._peek()
            self._receive(1)
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """Ends the connection; its outcome stays."""
        self.socket.close()

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._left and self._status in ("", "200"):
                self._left = self._left[self.socket.send(self._left[: 1 << 18]) :]
        if self._status not in ("", "200"):
            self._left = memoryview(b"")

    def _peek(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._look(self.socket.recv(len(_PREFIX) + 3, socket.MSG_PEEK))

    def _receive(self, most: int) -> None:
        try:
            data = self.socket.recv(most)
        except BlockingIOError:
            return
        if not data:
            self._close("closed")
        elif not self._status and most > 1:
            self._head += data[: 64 - len(self._head)]
            self._look(self._head)

    def _look(self, head: bytes) -> None:
        if head.startswith(_PREFIX) and len(head) >= len(_PREFIX) + 3:
            self._status = head[len(_PREFIX) : len(_PREFIX) + 3].decode("ascii", "replace")

    def _failed(self, error: OSError) -> None:
        reset = error.errno in (errno.ECONNRESET, errno.EPIPE)
        self._close("reset" if reset else errno.errorcode.get(error.errno or 0, str(error)))

    def _close(self, end: str) -> None:
        self._end = end
        self.socket.close()


class Attack:
    """All connections of one kind. `open` is the number of those that stand."""

    def __init__(self, kind: Kind, port: int, count: int, clock: Callable[[], float]) -> None:
        self._kind, self._port, self._count, self._clock = kind, port, count, clock
        self._requests = requests_of(kind)
        self._epoll = select.epoll()
        self._clients: dict[int, Client] = {}
        self._made = 0
        self._connecting = 0
        self._read_s = 0.0
        self.most_open = 0
        self.outcomes: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        """Makes the connections and holds them for `seconds`, or until none is left, and ends the rest."""
        until_s = self._clock() + seconds
        while self._clock() < until_s and (self._clients or self._made < self._count):
            while self._made < self._count and self._connecting < CONNECTING:
                self._open()
            for number, events in self._epoll.poll(POLL_S, 1024):
                self._handle(self._clients[number], number, events)
            self.most_open = max(self.most_open, len(self._clients) - self._connecting)
            if self._kind == "slow_readers" and self._clock() >= self._read_s + READ_S:
                self._read_s = self._clock()
                self._read_slowly()
        for client in self._clients.values():
            self.outcomes[client.outcome] += 1
            client.close()

    def _open(self) -> None:
        client = Client(self._kind, self._port, self._requests[self._made % len(self._requests)])
        self._made += 1
        self._connecting += 1
        self._clients[client.socket.fileno()] = client
        self._epoll.register(client.socket.fileno(), client.mask)

    def _handle(self, client: Client, number: int, events: int) -> None:
        connected, mask = client.connected, client.mask
        client.handle(events)
        if not connected and (client.connected or client.ended):
            self._connecting -= 1
        if client.ended:
            self._gone(number)
        elif client.mask != mask:
            self._epoll.modify(number, client.mask)

    def _read_slowly(self) -> None:
        for number, client in list(self._clients.items()):
            if client.connected:
                mask = client.mask
                client.read_a_byte()
                if client.ended:
                    self._gone(number)
                elif client.mask != mask:
                    self._epoll.modify(number, client.mask)

    def _gone(self, number: int) -> None:
        self.outcomes[self._clients.pop(number).outcome] += 1


def main() -> int:
    """Attacks, and prints what came of it."""
    parser = argparse.ArgumentParser(prog="benchmarks.hostile.clients", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    allow_files(args.count + SPARE_FILES)
    os.nice(NICE)
    attack = Attack(args.kind, args.port, args.count, time.monotonic)
    attack.run(args.seconds)
    found: Mapping[str, object] = {"most_open": attack.most_open, "outcomes": dict(attack.outcomes)}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
