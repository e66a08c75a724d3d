"""Makes and sends traces, in a thread.

Nothing is made while a request runs. When it has ended, the event loop hands over what was kept of it, and a thread
makes the spans and sends them. What the thread cannot take in time is dropped and counted; no request waits for it.
"""

import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from actors.telemetry.facts import Answered
from actors.telemetry.spans import write

log = logging.getLogger(__name__)

Result = Literal["exported", "dropped", "failed"]

RATIO = 0.01
"""The share of requests whose traces are kept where OTEL_TRACES_SAMPLER says nothing. Bad ones are kept anyway."""
MOST_WAITING = 1024
"""Most requests whose spans are not made yet."""
BATCH = 256
"""Most requests whose spans are sent together."""
BATCH_S = 1.0
"""Longest time that the first request of a batch waits for others."""
STOP_S = 3.0
"""Seconds for what waits to be sent when the process ends."""


class _Collects(SpanProcessor):
    """Keeps the spans that have ended until they are taken."""

    def __init__(self) -> None:
        self.ended: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)


class Traces:
    """The traces of one process. `count(result, n)` is called in the thread that exports, with numbers of requests
    whose spans were exported, or could not be.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        count: Callable[[Result, int], None],
        attributes: Mapping[str, str],
        sampler: Sampler | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`attributes` describe the process; `now_s` is the clock on which the requests' times are."""
        self._exporter, self._count, self._now_s = exporter, count, now_s
        self._collects = _Collects()
        # what reaches the provider has been sampled already
        provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource.create(dict(attributes)), shutdown_on_exit=False
        )
        provider.add_span_processor(self._collects)
        self._tracer = provider.get_tracer("sluice")
        self._sampler = sampler or _sampler()
        self._propagator = TraceContextTextMapPropagator()
        self._queue: queue.Queue[Answered | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def take(self, answered: Answered) -> Result | None:
        """Takes over a request that has ended, if its trace is to be kept. Returns "dropped" if there is no room."""
        if not answered.is_bad and not self._is_sampled(answered):
            return None
        try:
            self._queue.put_nowait(answered)
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

    def _is_sampled(self, answered: Answered) -> bool:
        parent = self._parent(answered)
        drawn = self._sampler.should_sample(parent, random.getrandbits(128), answered.path)
        return drawn.decision.is_sampled()

    def _parent(self, answered: Answered) -> Context | None:
        header = answered.kept.traceparent
        return None if header is None else self._propagator.extract({"traceparent": header}, Context())

    def _run(self) -> None:
        going_on = True
        while going_on:
            batch, going_on = self._next_batch()
            if not batch:
                continue
            result: Result = "failed"
            try:
                for answered in batch:
                    write(self._tracer, answered, self._wall_ns(), self._parent(answered))
                if self._exporter.export(self._collects.ended) is SpanExportResult.SUCCESS:
                    result = "exported"
            except Exception:
                # a bug, or a collector that answers nonsense: requests are served all the same
                log.exception("traces of %d requests are lost", len(batch))
            self._collects.ended = []
            self._count(result, len(batch))
        self._exporter.shutdown()

    def _next_batch(self) -> tuple[list[Answered], bool]:
        """Waits for requests and returns them, and whether there may be more."""
        first = self._queue.get()
        batch = [] if first is None else [first]
        end_s = time.monotonic() + BATCH_S
        while batch and len(batch) < BATCH:
            try:
                answered = self._queue.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                return batch, True
            if answered is None:
                return batch, False
            batch.append(answered)
        return batch, bool(batch)

    def _wall_ns(self) -> Callable[[float], int]:
        offset_s = time.time() - self._now_s()
        return lambda at_s: round((at_s + offset_s) * 1e9)


def _sampler() -> Sampler:
    """Returns the sampler that OTEL_TRACES_SAMPLER names, else one that follows the client and draws `RATIO`."""
    if os.environ.get("OTEL_TRACES_SAMPLER"):
        return TracerProvider(shutdown_on_exit=False).sampler
    return ParentBased(TraceIdRatioBased(RATIO))
