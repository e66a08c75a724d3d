"""The requests for output that one ingress replica is answering: their ids, their joint writes, and the drain."""

import asyncio
import itertools
import secrets
from typing import Protocol

from app.ingress.connections import IngressConnections


class OpenRequest(Protocol):
    """The methods of a request for output that `OpenRequests` calls; `app.ingress.exchange` implements them."""

    def flush(self) -> None: ...
    def broken(self, error: Exception) -> None: ...


class OpenRequests:
    """The requests for output under way, with what they share: ids, joint writes, and the drain.

    A request enters with `opened` and leaves with `closed`, exactly once each. Bytes for clients are collected during
    one iteration of the event loop and written at its end (`flush_soon`), in one write per client.
    """

    def __init__(self, connections: IngressConnections) -> None:
        self.connections = connections
        self.metrics = connections.metrics
        self.draining = False
        self._open: set[OpenRequest] = set()
        self._dirty: list[OpenRequest] = []
        self._idle = asyncio.Event()
        self._ids = itertools.count(1)
        self._id_prefix = secrets.token_hex(6)
        self.own_prefix = f"req-{self._id_prefix}"
        """Prefix of every request id that this replica gives."""
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, request: OpenRequest) -> None:
        """Counts `request` as under way."""
        self._open.add(request)

    def closed(self, request: OpenRequest) -> None:
        """Counts `request` as over, and ends the drain with the last one."""
        self._open.discard(request)
        if self.draining and not self._open:
            self._idle.set()

    def flush_soon(self, request: OpenRequest) -> None:
        """Has the pending output of `request` written at the end of this loop iteration, together with all others."""
        if not self._dirty:
            self._loop.call_soon(self._flush)
        self._dirty.append(request)

    def new_id(self) -> str:
        """Returns an id that no other request has, whichever replica serves it."""
        return f"{self._id_prefix}{next(self._ids):08x}"

    def model_name(self, asked: str | None) -> str:
        """Returns the model name for an answer: the one that was asked for, else the first served name."""
        return asked or self.connections.config.served_names[0]

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new requests and waits for those under way; returns True if all ended within `timeout_s`."""
        self.draining = True
        if self._open:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for request in dirty:
            try:
                request.flush()
            except Exception as error:  # a bug: the other answers go on
                self.metrics.internal_errors.inc()
                request.broken(error)
