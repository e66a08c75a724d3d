"""Server-sent events, decoded without I/O (WHATWG HTML, 9.2.6): bytes in, `data` payloads out.

Only `data` is returned; comments (keep-alives), `event`, `id` and `retry` are skipped, as the API does not use them.
"""

from __future__ import annotations

from .errors import InvalidResponseError

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Above this, one event is taken for garbage: the largest real ones (logprobs) are some kilobytes."""


class SSEDecoder:
    """Incremental decoder. Chunks may be cut anywhere: inside a line end, a UTF-8 character, an event."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._partial = b""
        self._data: list[bytes] = []
        self._size_bytes = 0

    def feed(self, chunk: bytes) -> list[str]:
        """Payloads of the events that `chunk` completes. Raises InvalidResponseError on bad UTF-8 or a huge event."""
        lines = (self._partial + chunk).splitlines(keepends=True)
        # A trailing CR may be half of a CRLF: it stays until the next byte is known.
        self._partial = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        payloads = []
        for line in lines:
            payload = self._line(line.rstrip(b"\r\n"))
            if payload is not None:
                payloads.append(payload)
        if self._size_bytes + len(self._partial) > self._max_event_bytes:
            raise InvalidResponseError(f"an event of the stream is larger than {self._max_event_bytes} bytes")
        return payloads

    def _line(self, line: bytes) -> str | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value[1:] if value.startswith(b" ") else value)
            self._size_bytes += len(value)
        return None

    def _dispatch(self) -> str | None:
        if not self._data:
            return None
        data, self._data, self._size_bytes = b"\n".join(self._data), [], 0
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidResponseError(f"an event of the stream is not UTF-8: {error}") from error
