"""The asynchronous stream, the twin of `Stream` in `_stream`, which documents the behaviour."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import httpx

from ._core import Deadline
from ._errors import SluiceError
from ._events import ChunkT, StreamFacts, StreamState, interruption

T = TypeVar("T")


async def within(deadline: Deadline, work: Awaitable[T]) -> T:
    """Returns the result of `work`. At the deadline it cancels `work` and raises RequestTimeoutError."""
    remaining_s = deadline.remaining_s()
    if remaining_s is None:
        return await work
    try:
        return await asyncio.wait_for(work, remaining_s)
    except asyncio.TimeoutError:  # noqa: UP041 - Python 3.10 has two of them
        raise deadline.error() from None


@dataclass(frozen=True)
class AsyncOpenResponse:
    """A response whose body is still to be read. `failure` makes the error for a failure to read it."""

    response: httpx.Response
    deadline: Deadline
    failure: Callable[[httpx.RequestError], SluiceError]


class AsyncStream(StreamFacts[ChunkT]):
    """The chunks of one answer, in order; see `Stream`.

        async with client.stream_chat("Tell me a story") as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)

    Always use `async with`: unlike a forgotten `Stream`, a forgotten asynchronous one cannot close itself.
    """

    def __init__(
        self, open_response: Callable[[], Awaitable[AsyncOpenResponse]], chunk_type: type[ChunkT]
    ) -> None:
        self._open_response = open_response
        self._state = StreamState(chunk_type)
        self._opened: AsyncOpenResponse | None = None
        self._raw: AsyncIterator[bytes] | None = None
        self._closed = False

    def __aiter__(self) -> AsyncStream[ChunkT]:
        return self

    async def __anext__(self) -> ChunkT:
        if self._closed:
            raise StopAsyncIteration
        try:
            raw = await self._open()
            while not self._state.done:
                chunk = self._state.take()
                if chunk is not None:
                    return chunk
                await self._pull(raw)
            await self._drain(raw)
        except BaseException:
            await self.close()
            raise
        await self.close()
        raise StopAsyncIteration

    async def _open(self) -> AsyncIterator[bytes]:
        if self._raw is None:
            self._opened = await self._open_response()
            self._state.request_id = self._opened.response.headers.get("x-request-id")
            self._raw = self._opened.response.aiter_bytes()
        return self._raw

    async def _pull(self, raw: AsyncIterator[bytes]) -> None:
        assert self._opened is not None
        try:
            piece = await within(self._opened.deadline, anext(raw, None))
        except httpx.RequestError as error:
            raise interruption(self._opened.failure(error)) from error
        if piece is not None:
            self._state.feed(piece)
        else:
            self._state.end_of_input()

    async def _drain(self, raw: AsyncIterator[bytes]) -> None:
        # The answer is complete after [DONE]; reading the body's end only keeps the connection for the next call.
        with suppress(httpx.RequestError):
            async for _ in raw:
                pass

    async def close(self) -> None:
        """Ends the stream; if it was not complete, the server cancels the request. Further calls do nothing."""
        self._closed = True
        if self._opened is not None:
            await self._opened.response.aclose()

    async def __aenter__(self) -> AsyncStream[ChunkT]:
        if not self._closed:
            await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if getattr(self, "_opened", None) is not None and not self._closed:
            warnings.warn(f"unclosed {self!r}: use it in an async with block", ResourceWarning, stacklevel=2)
