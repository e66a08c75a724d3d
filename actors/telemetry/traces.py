"""The choice of requests whose traces are kept: by parent and ratio from their beginning, and bad ones at their end."""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased

from actors.telemetry.export import Exports, Result, context_of, drawn_place
from actors.telemetry.facts import Answered, Kept
from actors.telemetry.spans import write

RATIO = 0.01
"""The share of requests whose traces are kept where OTEL_TRACES_SAMPLER says nothing. Bad ones are kept anyway."""


class Traces(Exports):
    """The traces of the requests of one ingress, by `sampler` (None: by the environment's)."""

    def __init__(
        self,
        exporter: SpanExporter,
        count: Callable[[Result, int], None],
        attributes: Mapping[str, str],
        sampler: Sampler | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(exporter, count, attributes, now_s)
        self._sampler = sampler or _sampler()

    def begin(self, path: str, traceparent: str | None) -> Kept:
        """Draws the place of a request that begins, below the client's span if `traceparent` names one, and decides
        whether it is sampled.
        """
        above = None if traceparent is None else context_of(traceparent)
        place = drawn_place(above)
        drawn = self._sampler.should_sample(above, place.trace_id, path)
        return Kept(place, drawn.decision.is_sampled())

    def take(self, answered: Answered) -> Result | None:
        """Takes over a request that has ended, if its trace is to be kept. Returns "dropped" if there is no room."""
        if not answered.is_bad and not answered.kept.sampled:
            return None
        return self.put(partial(write, answered))


def _sampler() -> Sampler:
    """Returns the sampler that OTEL_TRACES_SAMPLER names, else one that follows the client and draws `RATIO`."""
    if os.environ.get("OTEL_TRACES_SAMPLER"):
        return TracerProvider(shutdown_on_exit=False).sampler
    return ParentBased(TraceIdRatioBased(RATIO))
