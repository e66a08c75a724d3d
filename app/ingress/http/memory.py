"""The memory of requests that have arrived, wholly or in part, and are not being answered yet.

Admission counts requests when they are complete. Before that a client decides how many bytes the ingress holds for it,
so all connections of a replica share one bound on them.
"""

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from app.api.errors import ApiError

H = TypeVar("H")

SMALL_BYTES = 64 * 2**10
"""Bytes that each connection may hold whatever the others hold, so that large requests never keep small ones out. The
limit on connections bounds their sum.
"""


def most_body_bytes(path: str, large: Collection[str], max_body_bytes: int) -> int:
    """Returns the bytes that the body of a request for `path` may have: more than a few only on the paths that are
    `large`. Elsewhere nobody needs more, and nobody is asked for a key before the body is read.
    """
    return max_body_bytes if path in large else min(SMALL_BYTES, max_body_bytes)


class RequestMemory:
    """Counts the bytes that the connections of a replica hold, and refuses large requests beyond `limit_bytes`.

    `refused` is called with each refusal.
    """

    def __init__(self, limit_bytes: int, refused: Callable[[], None]) -> None:
        self.held_bytes = 0
        self._limit_bytes = limit_bytes
        self._refused = refused

    def change(self, before_bytes: int, now_bytes: int) -> None:
        """Counts that one connection holds `now_bytes` instead of `before_bytes`."""
        self.held_bytes += now_bytes - before_bytes

    def check_held(self, n_bytes: int) -> None:
        """Raises `ApiError` 503 if all connections hold too much and this one, with `n_bytes`, is not a small part."""
        if n_bytes > SMALL_BYTES and self.held_bytes > self._limit_bytes:
            raise self._refusal()

    def check_announced(self, n_bytes: int) -> None:
        """Raises `ApiError` 503 if there is no room for a body of this length, of which nothing has come yet."""
        if n_bytes > SMALL_BYTES and self.held_bytes + n_bytes > self._limit_bytes:
            raise self._refusal()

    def _refusal(self) -> ApiError:
        self._refused()
        message = f"{self.held_bytes} bytes of requests are arriving or waiting here; try again later."
        return ApiError(503, message, code="request_memory", retry_after_s=1.0, close=True)


class SharedBytes(Generic[H]):
    """Counts the bytes that each of many holders keeps for its client. Beyond `limit_bytes` for all of them the holder
    with the most bytes is dropped, and the next, until the rest is within it.

    `drop` is called with a holder that no longer counts.
    """

    def __init__(self, limit_bytes: int, drop: Callable[[H], None]) -> None:
        self.held_bytes = 0
        self._limit_bytes, self._drop = limit_bytes, drop
        self._held: dict[H, int] = {}

    def hold(self, holder: H, n_bytes: int) -> None:
        """Counts that `holder` keeps `n_bytes` now; 0 ends it."""
        before = self._held.pop(holder, 0)
        if n_bytes:
            self._held[holder] = n_bytes
        self.held_bytes += n_bytes - before
        while self.held_bytes > self._limit_bytes:
            largest = max(self._held, key=self._held.__getitem__)
            self.held_bytes -= self._held.pop(largest)
            self._drop(largest)
