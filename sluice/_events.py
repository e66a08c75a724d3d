"""The part of a stream that needs no I/O: it turns bytes into typed chunks or the right error.

A stream has `data: <chunk JSON>` events, then `data: [DONE]`. A failure is an event `data: {"error": {...}}`, after
which the stream ends without `[DONE]`. A stream that ends without either was cut.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Generic, TypeVar

from pydantic import ValidationError

from ._errors import (
    ConnectionFailedError,
    InvalidResponseError,
    SluiceError,
    StreamInterruptedError,
    error_from_event,
)
from .types import ChatChunk, CompletionChunk, Usage

ChunkT = TypeVar("ChunkT", ChatChunk, CompletionChunk)

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Largest event in bytes; the largest real ones (logprobs) have some kilobytes, so a larger one is garbage."""


class SSEDecoder:
    """An incremental decoder of server-sent events. Bytes may be cut anywhere: in a line end, a character, an event."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._partial = b""
        self._name = b""
        self._data: list[bytes] = []
        self._size_bytes = 0

    def feed(self, chunk: bytes) -> list[str]:
        """Returns the payloads of the events that `chunk` completes. Raises as `events` does."""
        return [payload for _, payload in self.events(chunk)]

    def events(self, chunk: bytes) -> list[tuple[str, str]]:
        """Returns the names of the events that `chunk` completes ("message" for one without) and their payloads.

        Raises InvalidResponseError for bad UTF-8 or a huge event.
        """
        lines = (self._partial + chunk).splitlines(keepends=True)
        # A trailing CR may be half of a CRLF: it stays until the next byte is known.
        self._partial = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        found = []
        for line in lines:
            event = self._line(line.rstrip(b"\r\n"))
            if event is not None:
                found.append(event)
        if self._size_bytes + len(self._partial) > self._max_event_bytes:
            raise InvalidResponseError(f"an event of the stream is larger than {self._max_event_bytes} bytes")
        return found

    def _line(self, line: bytes) -> tuple[str, str] | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value
        else:
            return None
        self._size_bytes += len(value)
        return None

    def _dispatch(self) -> tuple[str, str] | None:
        name, data, is_empty = self._name, b"\n".join(self._data), not self._data
        self._name, self._data, self._size_bytes = b"", [], 0
        if is_empty:
            return None
        try:
            return name.decode("utf-8") or "message", data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidResponseError(f"an event of the stream is not UTF-8: {error}") from error


def interruption(error: SluiceError) -> SluiceError:
    """Returns the error to raise for a failed read of a stream's body.

    A connection that breaks there leaves a partial answer, which is a StreamInterruptedError.
    """
    return StreamInterruptedError(str(error)) if isinstance(error, ConnectionFailedError) else error


class StreamState(Generic[ChunkT]):
    """The chunks of a stream that wait to be taken, and the facts that earlier chunks brought."""

    def __init__(self, chunk_type: type[ChunkT]) -> None:
        self._chunk_type: type[ChunkT] = chunk_type
        self._decoder = SSEDecoder()
        self._pending: deque[ChunkT] = deque()
        self._failure: SluiceError | None = None
        self._complete = False
        self.request_id: str | None = None
        self.usage: Usage | None = None
        self.finish_reason: str | None = None

    @property
    def done(self) -> bool:
        """Whether the stream ended well and nothing is left to take."""
        return self._complete and not self._pending

    def feed(self, raw: bytes) -> None:
        """Takes in the next bytes of the body; events after `[DONE]` or after a failure are ignored."""
        try:
            payloads = self._decoder.feed(raw)
        except InvalidResponseError as error:
            self._fail(error)
            return
        for payload in payloads:
            if self._complete or self._failure is not None:
                return
            if payload.strip() == "[DONE]":
                self._complete = True
            else:
                self._event(payload)

    def end_of_input(self) -> None:
        """Notes that the response's body has ended, which is a failure unless `[DONE]` has come."""
        if not self._complete:
            self._fail(
                StreamInterruptedError("the stream ended without [DONE]: the server or a proxy cut it")
            )

    def take(self) -> ChunkT | None:
        """Returns the next chunk, or None if more bytes are needed.

        Raises the stream's failure after the last good chunk.
        """
        if self._pending:
            chunk = self._pending.popleft()
            self._note(chunk)
            return chunk
        if self._failure is not None:
            raise self._failure
        return None

    def _event(self, payload: str) -> None:
        try:
            # Only an error event has the key at its top level; the search spares other events a second parse.
            if '"error"' in payload and self._error_event(payload):
                return
            self._pending.append(self._chunk_type.model_validate_json(payload))
        except ValidationError as error:
            reason = error.errors(include_url=False, include_input=False)[0]["msg"]
            self._fail(
                InvalidResponseError(f"an event of the stream is not a chunk ({reason}): {payload[:200]!r}")
            )

    def _error_event(self, payload: str) -> bool:
        try:
            content = json.loads(payload)
        except (ValueError, RecursionError):
            return False
        if not isinstance(content, dict) or not content.get("error"):
            return False
        self._fail(error_from_event(content, self.request_id))
        return True

    def _fail(self, error: SluiceError) -> None:
        if self._failure is None:
            self._failure = error

    def _note(self, chunk: ChunkT) -> None:
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            if choice.index == 0 and choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason


class StreamFacts(Generic[ChunkT]):
    """The facts about a stream that both clients show, read from its `StreamState`."""

    _state: StreamState[ChunkT]

    @property
    def request_id(self) -> str | None:
        """The response's `x-request-id`, or None before the stream is open."""
        return self._state.request_id

    @property
    def usage(self) -> Usage | None:
        """The token counts; None until the stream has brought them at its end."""
        return self._state.usage

    @property
    def finish_reason(self) -> str | None:
        """The reason why choice 0 ended; None until it has."""
        return self._state.finish_reason
