"""The trace of an engine's start: one span for the whole, one for each step, and below them its kind's own phases.

The whole span's place is drawn when the start begins. While the engine starts, the environment variable `traceparent`
names it, so that what vLLM traces of its own loading, in its processes too, stands below it.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import SpanKind, set_span_in_context

from actors.telemetry.export import Exports, Scribe, drawn_place

VARIABLE = "traceparent"
"""The environment variable from which vLLM takes the span above its own (`vllm.tracing.otel._get_smart_context`)."""

_STEP_OF_PHASE = {
    "weights": "weights",
    "kv_cache": "post_load",
    "core_ready": "post_load",
    "warm_up": "post_load",
}
"""The step to which a phase of a vLLM engine's start belongs (`actors.engine.vllm.launch`); others are `process`."""


class StartTrace:
    """The trace of one engine's start, which begins when this is made. `exporter` makes what sends it."""

    def __init__(
        self,
        exporter: Callable[[], SpanExporter],
        names: Mapping[str, str],
        engine_id: str,
        role: str,
        kind: str,
    ) -> None:
        self._exporter, self._names = exporter, names
        self._attributes = {"sluice.engine": engine_id, "sluice.role": role, "sluice.engine_kind": kind}
        self.place = drawn_place()

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """Has processes that are started in this context, and vLLM in this one, put their spans below the start's."""
        os.environ[VARIABLE] = self.place.traceparent
        try:
            yield
        finally:
            os.environ.pop(VARIABLE, None)

    def send(self, began_s: float, steps: Mapping[str, float], phases: Mapping[str, float]) -> None:
        """Sends the trace of a start that began at `began_s` (Unix time) with these steps, in seconds and in their
        order, and these phases of its engine. It blocks until the collector has answered, for a few seconds at most.
        """
        # these times are Unix times already
        exports = Exports(self._exporter(), lambda result, number: None, self._names, time.time)
        exports.put(lambda scribe: self._write(scribe, began_s, steps, phases))
        exports.stop()

    def _write(
        self, scribe: Scribe, began_s: float, steps: Mapping[str, float], phases: Mapping[str, float]
    ) -> None:
        whole = scribe.at(self.place, "engine start", SpanKind.INTERNAL, self._attributes, began_s)
        inside, at_s = set_span_in_context(whole), began_s
        for step, took_s in steps.items():
            span = scribe.tracer.start_span(step, inside, start_time=scribe.wall_ns(at_s))
            within, phase_s = set_span_in_context(span), at_s
            for phase, phase_took_s in phases.items():
                if phase != step and _STEP_OF_PHASE.get(phase, "process") == step:
                    one = scribe.tracer.start_span(phase, within, start_time=scribe.wall_ns(phase_s))
                    phase_s += phase_took_s
                    one.end(scribe.wall_ns(phase_s))
            at_s += took_s
            span.end(scribe.wall_ns(max(at_s, phase_s)))
        whole.end(scribe.wall_ns(at_s))
