"""The requests for output that one ingress replica is answering: their ids, their joint writes, and the drain."""

import asyncio
import itertools
import logging
import random
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from actors.telemetry.facts import Answered, Kept, Place
from app.api.errors import NOT_AGAIN, ApiError, draining
from app.ingress.connections import IngressConnections
from app.ingress.http.memory import SharedBytes
from app.ingress.work_bound import WorkBound

if TYPE_CHECKING:
    from actors.telemetry.traces import Traces

log = logging.getLogger(__name__)


KEEP_ALIVE_LOOKS = 4
"""Times that silent streams are looked for in the time after which one gets a comment."""


class RequestId(NamedTuple):
    """The names of one HTTP request: the one that its answer `shown` has in x-request-id, `own` of this system, which
    no client chooses, and the `client`'s, or "". `traceparent` is the client's place in a trace, where traces are kept.
    `wants_times` says whether the client wants the request's way noted, hop by hop.
    """

    shown: str
    own: str
    client: str = ""
    traceparent: str | None = None
    wants_times: bool = False


class OpenRequest(Protocol):
    """The methods of a request for output that `OpenRequests` calls; `app.ingress.exchange` implements them."""

    def flush(self) -> None: ...
    def keep_alive(self, silent_s: float) -> None: ...
    def fail(self, error: ApiError) -> None: ...
    def broken(self, error: Exception) -> None: ...


class OpenRequests:
    """The requests for output under way, with what they share: ids, joint writes, and the drain.

    A request enters with `opened` and leaves with `closed`, exactly once each. Bytes for clients are collected during
    one iteration of the event loop and written at its end (`flush_soon`), in one write per client.
    """

    def __init__(self, connections: IngressConnections, traces: "Traces | None" = None) -> None:
        self.connections = connections
        self.traces = traces
        self._observers = connections.observers
        self.metrics = connections.metrics
        self.draining = False
        config = connections.config
        self._silent_s = config.sse_keep_alive_s
        self._keeping: asyncio.TimerHandle | None = None
        self.answers: SharedBytes[OpenRequest] = SharedBytes(config.max_answer_bytes, _drop)
        """The memory of whole answers that are not complete."""
        self.work = WorkBound(config.max_sequences, config.max_prompt_bytes)
        """The prompts under way."""
        self._open: set[OpenRequest] = set()
        self._dirty: list[OpenRequest] = []
        self._idle = asyncio.Event()
        self._ids = itertools.count(1)
        self._id_prefix = secrets.token_hex(6)
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._open)

    def keep(self, path: str, name: RequestId) -> Kept | None:
        """Returns where the attempts of a request that begins are kept, for its trace, for observers, and for a client
        that wants its times; None if nobody wants them.
        """
        if self.traces is not None:
            return self.traces.begin(path, name.traceparent, name.wants_times)
        seen = self._observers.has_room()
        if name.wants_times:
            # a place in no trace that is kept: by it router and engines know that the request is followed
            return Kept(asked=Place(random.getrandbits(128) or 1, random.getrandbits(64) or 1))
        return Kept() if seen else None

    def ended(self, answered: Answered) -> None:
        """Hands over what was kept of a request that has ended."""
        result = None if self.traces is None else self.traces.take(answered)
        if result == "dropped":
            self.metrics.traces.labels(result).inc()
        self._observers.ended(answered, result == "taken")

    def opened(self, request: OpenRequest) -> None:
        """Counts `request` as under way."""
        self._open.add(request)
        if self._silent_s is not None and self._keeping is None:
            self._keeping = self._loop.call_later(self._silent_s / KEEP_ALIVE_LOOKS, self._keep_alive)

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

    def soon(self, work: Callable[[], None], request: OpenRequest) -> None:
        """Has `work` for a request done in the next iteration of the event loop."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # a bug; the other answers go on
                self.metrics.internal_errors.inc()
                request.broken(error)

        self._loop.call_soon(run)

    def new_id(self, client: str | None) -> RequestId:
        """Returns the names of a request. `own` is one that no other request has, whichever replica serves it; a
        `client` that sends such a name as its own (every answer shows one) does not get it.
        """
        own = f"{self._id_prefix}{next(self._ids):08x}"
        # the answer's id differs from the name shown only in its prefix
        return RequestId(f"req-{own}", own) if client is None else RequestId(client, own, client)

    def model_name(self, asked: str | None) -> str:
        """Returns the model name for an answer: the one that was asked for, else the first served name."""
        return asked or self.connections.config.served_names[0]

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new requests and waits for those under way. Returns True if all ended within `timeout_s`; the others
        end with an error then.
        """
        self.draining = True
        if not self._open:
            return True
        self._idle.clear()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            return True
        except TimeoutError:
            log.warning("%d requests have not ended in %g s: they fail", len(self._open), timeout_s)
            for request in list(self._open):
                request.fail(draining("This replica was stopped before the answer was complete; try again."))
            return False

    @property
    def keeps_alive(self) -> bool:
        """Whether silent streams get comments."""
        return self._silent_s is not None

    def _keep_alive(self) -> None:
        """Has silent streams kept alive, and looks again as long as any request is under way."""
        self._keeping = None
        if not self._open or self._silent_s is None:
            return
        self._keeping = self._loop.call_later(self._silent_s / KEEP_ALIVE_LOOKS, self._keep_alive)
        for request in list(self._open):
            try:
                request.keep_alive(self._silent_s)
            except Exception as error:  # a bug; the other answers go on
                self.metrics.internal_errors.inc()
                request.broken(error)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for request in dirty:
            try:
                request.flush()
            except Exception as error:  # a bug: the other answers go on
                self.metrics.internal_errors.inc()
                request.broken(error)


def _drop(request: OpenRequest) -> None:
    message = "The answers that wait here for their ends take too much memory, and this one takes the most."
    advice = "Ask for a stream, or for fewer log probabilities."
    # as it is, it would take as much memory again
    request.fail(ApiError(503, f"{message} {advice}", code="answer_memory", headers=[NOT_AGAIN]))
