"""Makes and sends spans, in a thread.

Nothing is made where something happens. The event loop hands over what was kept of it, and a thread makes the spans and
sends them. What the thread cannot take in time is dropped and counted; nothing waits for it.
"""

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    INVALID_SPAN_ID,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from actors.telemetry.facts import Place

log = logging.getLogger(__name__)

Result = Literal["exported", "dropped", "failed"]
Attributes = Mapping[str, str | int | float | bool]

MOST_WAITING = 1024
"""Most requests (or decisions) whose spans are not made yet."""
BATCH = 256
"""Most requests whose spans are sent together."""
BATCH_S = 1.0
"""Longest time that the first request of a batch waits for others."""
STOP_S = 3.0
"""Seconds for what waits to be sent when the process ends."""

_PROPAGATOR = TraceContextTextMapPropagator()


class _Collects(SpanProcessor):
    """Keeps the spans that have ended until they are taken."""

    def __init__(self) -> None:
        self.ended: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)


class _Ids(RandomIdGenerator):
    """Gives the next span the ids that were drawn for it, and other spans random ones."""

    def __init__(self) -> None:
        self.drawn: Place | None = None

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.drawn is None else self.drawn.trace_id

    def generate_span_id(self) -> int:
        drawn, self.drawn = self.drawn, None
        return super().generate_span_id() if drawn is None else drawn.span_id


@dataclass(frozen=True, slots=True)
class Scribe:
    """Starts spans. `wall_ns` returns nanoseconds since the epoch for seconds on the clock of the process."""

    tracer: Tracer
    wall_ns: Callable[[float], int]
    _ids: _Ids

    def at(self, place: Place, name: str, kind: SpanKind, attributes: Attributes, start_s: float) -> Span:
        """Starts the span whose place was drawn before."""
        above = None if place.parent_id is None else below(Place(place.trace_id, place.parent_id))
        # a context of its own, so that no span of this thread is taken for the parent
        self._ids.drawn = place
        return self.tracer.start_span(
            name, above or Context(), kind, dict(attributes), start_time=self.wall_ns(start_s)
        )


def below(place: Place) -> Context:
    """Returns the context of spans below the one at `place`, which may be in another process."""
    context = SpanContext(
        place.trace_id, place.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )
    return set_span_in_context(NonRecordingSpan(context), Context())


def context_of(traceparent: str) -> Context:
    """Returns the context of spans below the one that the header names; that of no trace for a faulty header."""
    return _PROPAGATOR.extract({"traceparent": traceparent}, Context())


def drawn_place(above: Context | None = None) -> Place:
    """Returns the place of a new span: below the one of `above`, or the first of a trace of its own."""
    span_id = random.getrandbits(64) or 1
    told = get_current_span(above).get_span_context() if above is not None else None
    if told is None or not told.is_valid or told.span_id == INVALID_SPAN_ID:
        return Place(random.getrandbits(128) or 1, span_id)
    return Place(told.trace_id, span_id, told.span_id)


class Exports:
    """The spans of one process, sent by a thread. `count(result, n)` is called in that thread, with numbers of requests
    (or of what else was `put`) whose spans were exported, or could not be. `attributes` describe the process, and
    `now_s` is the clock on which all times are.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        count: Callable[[Result, int], None],
        attributes: Mapping[str, str],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exporter, self._count, self._now_s = exporter, count, now_s
        self._collects, self._ids = _Collects(), _Ids()
        # what reaches the provider has been sampled already
        provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create(dict(attributes)),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        provider.add_span_processor(self._collects)
        self._tracer = provider.get_tracer("sluice")
        self._queue: queue.Queue[Callable[[Scribe], None] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, write: Callable[[Scribe], None]) -> Result | None:
        """Has `write` start and end spans, in the thread. Returns "dropped" if there is no room."""
        try:
            self._queue.put_nowait(write)
        except queue.Full:
            return "dropped"
        return None

    def stop(self) -> None:
        """Sends what waits, for `STOP_S` at most. Idempotent."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            log.warning("%d traces are lost, because the collector is too slow", self._queue.qsize())
            return
        self._thread.join(STOP_S)

    def _run(self) -> None:
        going_on = True
        while going_on:
            batch, going_on = self._next_batch()
            if not batch:
                continue
            made = self._make(batch)
            if made < len(batch):
                self._count("failed", len(batch) - made)
            if made:
                self._count(self._send(made), made)
            self._collects.ended = []
        self._exporter.shutdown()

    def _make(self, batch: Sequence[Callable[[Scribe], None]]) -> int:
        """Makes the spans of a batch; returns of how many requests they could be made. What a failed one has made until
        then is no whole trace and is dropped, and the others go on.
        """
        scribe = Scribe(self._tracer, self._wall_ns(), self._ids)
        made = 0
        failure: Exception | None = None
        for write in batch:
            ended = len(self._collects.ended)
            try:
                write(scribe)
                made += 1
            except Exception as error:
                failure = error
                del self._collects.ended[ended:]
                self._ids.drawn = None
        if failure is not None:
            # a bug: requests are served all the same
            log.error("no traces can be made of %d requests", len(batch) - made, exc_info=failure)
        return made

    def _send(self, requests: int) -> Result:
        """Sends the spans that were made, of this number of requests."""
        try:
            if self._exporter.export(self._collects.ended) is SpanExportResult.SUCCESS:
                return "exported"
        except Exception:
            # a bug, or a collector that answers nonsense
            log.exception("traces of %d requests are lost", requests)
        return "failed"

    def _next_batch(self) -> tuple[list[Callable[[Scribe], None]], bool]:
        """Waits for something to write and returns it with what follows soon, and whether there may be more."""
        first = self._queue.get()
        batch = [] if first is None else [first]
        end_s = time.monotonic() + BATCH_S
        while batch and len(batch) < BATCH:
            try:
                write = self._queue.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                return batch, True
            if write is None:
                return batch, False
            batch.append(write)
        return batch, bool(batch)

    def _wall_ns(self) -> Callable[[float], int]:
        offset_s = time.time() - self._now_s()
        return lambda at_s: round((at_s + offset_s) * 1e9)
