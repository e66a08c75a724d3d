"""NIXL's side channel over real sockets: garbage of every kind, then the request that vLLM sends."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")

from actors.engine.vllm.connector import LISTENER, listener
from actors.engine.vllm.connector.listener import HandshakeListener
from actors.engine.vllm.connector.messages import SluiceStats
from actors.engine.vllm.connector.scheduler import SluiceScheduler
from benchmarks.live.servers import free_ports

HOST = "127.0.0.1"
METADATA = {(0, 0): b"rank 0", (0, 1): b"rank 1"}
GET = b"get_meta_msg"
PATIENCE_MS = 20_000


def free_port() -> int:
    """A port that the kernel gives to none of the tests beside this one."""
    return free_ports(1)[0]


class Served:
    """The connector's scheduler half with its listener's thread, as vLLM starts it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.scheduler: Any = object.__new__(SluiceScheduler)
        self.scheduler._listen_error = None
        self.scheduler._listener = None
        self.scheduler._reported = listener.ListenerCounts()
        self.scheduler.stats = SluiceStats()
        self.stop, ready = threading.Event(), threading.Event()
        self.thread = threading.Thread(
            target=self.scheduler._nixl_handshake_listener,
            args=(METADATA, ready, self.stop, HOST, port),
            daemon=True,
        )
        self.thread.start()
        assert ready.wait(20)

    @property
    def counts(self) -> listener.ListenerCounts:
        counts = self.scheduler._listener.counts
        assert isinstance(counts, listener.ListenerCounts)
        return counts

    def until_refused(self, count: int) -> None:
        self._until(lambda: self.counts.refused >= count)

    def until_reopened(self) -> None:
        self._until(lambda: self.counts.reopened > 0)

    def _until(self, reached: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 20
        while not reached():
            assert time.monotonic() < end_s, self.counts
            time.sleep(0.005)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(free_port())
    yield served
    served.stop.set()
    served.thread.join(20)
    assert not served.thread.is_alive()


def handshake(port: int, rank: tuple[int, int] = (0, 0), patience_ms: int = PATIENCE_MS) -> list[bytes]:
    """The parts of the answer to one request, asked over a REQ socket as vLLM's worker does in `_nixl_handshake`."""
    with zmq.Context() as context, context.socket(zmq.REQ) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.setsockopt(zmq.RCVTIMEO, patience_ms)
        asker.connect(f"tcp://{HOST}:{port}")
        asker.send(msgspec.msgpack.encode((GET, *rank)))
        return list(asker.recv_multipart())


def asked_until_answered(port: int) -> list[bytes]:
    """The answer to one of several requests, each of which is given up after two seconds."""
    end_s = time.monotonic() + PATIENCE_MS / 1e3
    while True:
        try:
            return handshake(port, patience_ms=2000)
        except zmq.Again:
            assert time.monotonic() < end_s, "no request was answered"


GARBAGE = {
    "one_part": [b"x"],
    "no_msgpack": [b"", b"\xc1\xff"],
    "empty": [b"", b""],
    "a_number": [b"", msgspec.msgpack.encode(7)],
    "too_short": [b"", msgspec.msgpack.encode((GET, 0))],
    "another_word": [b"", msgspec.msgpack.encode((b"who are you", 0, 0))],
    "ranks_of_text": [b"", msgspec.msgpack.encode((GET, "0", "0"))],
    "unknown_rank": [b"", msgspec.msgpack.encode((GET, 0, 9))],
    "unhashable_rank": [b"", msgspec.msgpack.encode((GET, [0], [1]))],
    "many_parts": [b"", b"a", b"b", b"c"],
    "no_delimiter": [b"a", msgspec.msgpack.encode((GET, 0, 0))],
    "nested": [b"", b"\x91" * 900 + b"\xc0"],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE)
def test_a_handshake_works_after_garbage(served: Served, frames: list[bytes]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://{HOST}:{served.port}")
        stranger.send_multipart(frames)
        served.until_refused(1)
    metadata, clock = handshake(served.port, (0, 1))
    assert metadata == b"rank 1"
    assert abs(msgspec.msgpack.decode(clock) - time.perf_counter()) < 3600
    assert served.thread.is_alive()
    assert (served.counts.answered, served.counts.refused) == (1, 1)


def test_no_other_address_of_the_node_takes_connections(served: Served) -> None:
    # every address of 127.0.0.0/8 is this machine's
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", served.port), 20)
    assert handshake(served.port)[0] == b"rank 0"


def test_bytes_that_are_no_zmtp_and_messages_that_are_too_large_change_nothing(served: Served) -> None:
    with socket.create_connection((HOST, served.port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://{HOST}:{served.port}")
        stranger.send_multipart([b"", bytes(10 * listener.MAX_REQUEST_BYTES)])
        assert handshake(served.port)[0] == b"rank 0"


def test_an_unknown_rank_is_told_so_at_once(served: Served) -> None:
    """vLLM's worker fails over an answer of one part; without one it would wait for five seconds."""
    assert handshake(served.port, (3, 0)) == [b""]


def test_a_socket_that_fails_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([True])
    answer_all = HandshakeListener._answer_all

    def failing(self: HandshakeListener, channel: Any, stop: threading.Event) -> None:
        if next(failures, False):
            raise zmq.ZMQError(zmq.ENOTSOCK)
        answer_all(self, channel, stop)

    monkeypatch.setattr(HandshakeListener, "_answer_all", failing)
    monkeypatch.setattr(listener, "REOPEN_S", 0.01)
    served = Served(free_port())
    served.until_reopened()
    # ZeroMQ closes the failed socket in a thread of its own. For a moment that socket still holds the port, and a
    # request that it takes is lost.
    assert asked_until_answered(served.port)[0] == b"rank 0"
    assert served.counts.reopened >= 1
    served.stop.set()
    served.thread.join(20)


def test_a_thread_that_has_ended_is_started_again() -> None:
    """Nothing but a fault of the interpreter ends it; the next step of the core starts it anew."""
    port = free_port()
    served = Served(port)
    scheduler = served.scheduler
    scheduler._nixl_handshake_listener_t = served.thread
    scheduler._stop_event = served.stop
    served.stop.set()
    served.thread.join(20)
    scheduler._stop_event = threading.Event()
    scheduler._keep_listening()
    assert handshake(port)[0] == b"rank 0"
    running = scheduler._nixl_handshake_listener_t
    scheduler._keep_listening()
    assert scheduler._nixl_handshake_listener_t is running
    # The engine hears of it once.
    assert scheduler.stats.data[LISTENER] == [[0, 1]]
    scheduler._stop_event.set()
    running.join(20)


def test_the_log_of_refusals_is_rate_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = []
    monkeypatch.setattr(listener, "logger", SimpleNamespace(warning=lambda *args: lines.append(args)))
    quiet = HandshakeListener({}, HOST, 1)
    for _ in range(1000):
        quiet._log("a message was refused")
    assert len(lines) == 1
