"""The synchronous stream: an iterator of chunks that is also a context manager."""

from __future__ import annotations

import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import httpx

from ._core import Deadline
from ._errors import SluiceError
from ._events import ChunkT, StreamFacts, StreamState, interruption


class Watchdog:
    """Ends a blocking read at the deadline: httpx limits each read, but not their sum.

    If there is a deadline, a timer thread shuts the socket down then, which wakes the reader with an end of file.
    Without a socket of its own (a custom transport, HTTP/2) only the limit of each read holds.
    """

    def __init__(self, response: httpx.Response, deadline: Deadline) -> None:
        self.fired = False
        self._timer: threading.Timer | None = None
        remaining_s = deadline.remaining_s()
        if remaining_s is None or not response.http_version.startswith("HTTP/1"):
            return  # HTTP/2 shares its socket
        network = response.extensions.get("network_stream")
        sock = None if network is None else network.get_extra_info("socket")
        if isinstance(sock, socket.socket):
            self._timer = threading.Timer(remaining_s, self._shut, (sock,))
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        """Stops the timer, because the response has been read and its connection must be left alone."""
        if self._timer is not None:
            self._timer.cancel()

    def _shut(self, sock: socket.socket) -> None:
        self.fired = True
        # The plain socket's method is right for TLS too: SSLSocket's own ends the session while the reader uses it.
        with suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


@dataclass(frozen=True)
class OpenResponse:
    """A response whose body is still to be read. `failure` makes the error for a failure to read it."""

    response: httpx.Response
    deadline: Deadline
    watchdog: Watchdog
    failure: Callable[[httpx.RequestError], SluiceError]

    def close(self) -> None:
        """Gives the connection back if the body was read to its end; otherwise cuts it, which cancels the request."""
        self.watchdog.cancel()
        self.response.close()


class Stream(StreamFacts[ChunkT]):
    """The chunks of one answer, in order.

    The request is sent (with retries) when the stream is entered or first iterated. Use it as a context manager:
    leaving the block early closes the connection, upon which the server stops prefill and decode.

        with client.stream_chat("Tell me a story") as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print(stream.usage)

    Iteration raises EngineFailedError for an error event, StreamInterruptedError for a cut connection,
    RequestTimeoutError, and the errors of any call. It never retries after the first byte, and ends after `close()`.
    """

    def __init__(self, open_response: Callable[[], OpenResponse], chunk_type: type[ChunkT]) -> None:
        self._open_response = open_response
        self._state = StreamState(chunk_type)
        self._opened: OpenResponse | None = None
        self._raw: Iterator[bytes] = iter(())
        self._closed = False

    def __iter__(self) -> Stream[ChunkT]:
        return self

    def __next__(self) -> ChunkT:
        if self._closed:
            raise StopIteration
        try:
            opened = self._open()
            while not self._state.done:
                chunk = self._state.take()
                if chunk is not None:
                    return chunk
                self._pull(opened)
            self._drain()
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def _open(self) -> OpenResponse:
        if self._opened is None:
            self._opened = self._open_response()
            self._state.request_id = self._opened.response.headers.get("x-request-id")
            self._raw = self._opened.response.iter_bytes()
        return self._opened

    def _pull(self, opened: OpenResponse) -> None:
        try:
            raw = next(self._raw, None)
        except httpx.RequestError as error:
            raise interruption(opened.failure(error)) from error
        if raw is not None:
            self._state.feed(raw)
        elif opened.watchdog.fired:
            raise opened.deadline.error()
        else:
            self._state.end_of_input()

    def _drain(self) -> None:
        # The answer is complete after [DONE]; reading the body's end only keeps the connection for the next call.
        with suppress(httpx.RequestError):
            for _ in self._raw:
                pass

    def close(self) -> None:
        """Ends the stream; if it was not complete, the server cancels the request. Further calls do nothing."""
        self._closed = True
        if self._opened is not None:
            self._opened.close()

    def __enter__(self) -> Stream[ChunkT]:
        if not self._closed:
            self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_opened", None) is not None and not self._closed:
            warnings.warn(f"unclosed {self!r}: use it in a with block", ResourceWarning, stacklevel=2)
            self.close()
