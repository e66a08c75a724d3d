"""The side channel on which decode engines ask a prefill engine for its NIXL metadata before their first read.

vLLM's own listener ends at the first message that it does not understand: a port scanner's, another service's, or that
of an engine with another pipeline layout. Every decode engine that starts later would then fail forever. This one
answers what it understands, ignores the rest, and goes on; if its socket fails, it opens it again.

It speaks vLLM's protocol. A request is `[identity, b"", (GET_META_MSG, pipeline rank, tensor rank)]` in msgpack. The
answer is `[identity, b"", metadata, this process's perf_counter]`, from which the asker computes the clocks' offset. A
request for a rank that does not exist gets an answer of one empty part, over which the asker fails at once instead of
waiting for five seconds.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.logger import init_logger
from vllm.utils.network_utils import make_zmq_path

if TYPE_CHECKING:
    import threading

logger = init_logger(__name__)

POLL_MS = 250
"""Longest wait for a message before the thread looks whether it should end, in milliseconds."""

MAX_REQUEST_BYTES = 1024
"""Largest message that is read; a request has some 20 bytes."""

LOG_EVERY_S = 10.0
"""Least seconds between two lines of log about refused messages, so that a scanner does not fill the disk."""

REOPEN_S = 0.5
"""Seconds to wait before a socket that failed is opened again."""

Rank = tuple[int, int]
"""A worker's pipeline and tensor rank."""


class Refused(ValueError):
    """A message that is no request for metadata."""


@dataclass
class ListenerCounts:
    """Totals of one listener: requests it answered, messages it refused, and times it opened its socket again."""

    answered: int = 0
    refused: int = 0
    reopened: int = 0


def requested_rank(frames: Sequence[bytes]) -> tuple[bytes, Rank]:
    """Returns the sender and the rank of a request. Raises Refused for any other message."""
    if len(frames) != 3 or frames[1] != b"":
        raise Refused(f"{len(frames)} parts where a request has 3")
    try:
        content = msgspec.msgpack.decode(frames[2])
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(f"no msgpack: {error}") from error
    match content:
        case [word, int(pipeline), int(tensor)] if word == GET_META_MSG:
            return frames[0], (pipeline, tensor)
    raise Refused("no request for metadata")


class HandshakeListener:
    """Answers requests for `metadata` (encoded, by rank) on TCP port `port` of `host`."""

    def __init__(self, metadata: Mapping[Rank, bytes], host: str, port: int) -> None:
        self._metadata = metadata
        self._path = make_zmq_path("tcp", host, port)
        self._logged_s = float("-inf")
        self.counts = ListenerCounts()

    def serve(self, ready: "threading.Event", stop: "threading.Event") -> None:
        """Listens until `stop`, and sets `ready` once the socket is open. Raises zmq.ZMQError if the first opening
        fails; later failures lead to another opening.
        """
        with zmq.Context() as context:
            while not stop.is_set():
                try:
                    with self._open(context) as socket:
                        ready.set()
                        self._answer_all(socket, stop)
                except Exception as error:
                    if not ready.is_set():
                        raise
                    self.counts.reopened += 1
                    self._log(f"the socket failed ({error!r}); it is opened again")
                    stop.wait(REOPEN_S)

    def _open(self, context: "zmq.Context[Any]") -> Any:
        socket = context.socket(zmq.ROUTER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, POLL_MS)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            socket.setsockopt(zmq.IPV6, int("[" in self._path))
            socket.bind(self._path)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _answer_all(self, socket: Any, stop: "threading.Event") -> None:
        while not stop.is_set():
            try:
                frames = socket.recv_multipart()
            except zmq.Again:
                continue
            try:
                sender, rank = requested_rank(frames)
            except Refused as error:
                self.counts.refused += 1
                self._log(f"a message was refused: {error}")
                continue
            metadata = self._metadata.get(rank)
            if metadata is None:
                self.counts.refused += 1
                self._log(f"there is no worker of pipeline and tensor rank {rank}")
                socket.send_multipart((sender, b"", b""))
                continue
            self.counts.answered += 1
            socket.send_multipart((sender, b"", metadata, msgspec.msgpack.encode(time.perf_counter())))

    def _log(self, what: str) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s < LOG_EVERY_S:
            return
        self._logged_s = now_s
        logger.warning(
            "NIXL side channel %s: %s (answered: %d, refused: %d, opened again: %d)",
            self._path, what, self.counts.answered, self.counts.refused, self.counts.reopened,
        )  # fmt: skip
