"""The choice of requests whose traces are kept: by parent and ratio from their beginning, and bad ones at their end.

What a client forces is bounded (`forced`): a request counts as forced where the sampler would not take it without the
client's header. So are, apart from those, requests that are kept for a missed objective only, which a client may choose
such that it is always missed.
"""

import os
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased

from actors.telemetry.export import Exports, Result, context_of, drawn_place
from actors.telemetry.facts import Answered, Kept
from actors.telemetry.forced import ForcedTraces
from actors.telemetry.spans import write

RATIO = 0.01
"""The share of requests whose traces are kept where OTEL_TRACES_SAMPLER says nothing. Bad ones are kept anyway."""


class Traces(Exports):
    """The traces of the requests of one ingress, by `sampler` (None: by the environment's). Clients force at most
    `forced_per_s` a second (None: no bound).
    """

    def __init__(
        self,
        exporter: SpanExporter,
        count: Callable[[Result, int], None],
        attributes: Mapping[str, str],
        sampler: Sampler | None = None,
        now_s: Callable[[], float] = time.monotonic,
        forced_per_s: float | None = None,
    ) -> None:
        super().__init__(exporter, count, attributes, now_s)
        self._sampler = sampler or _sampler()
        self._forced, self._missed = ForcedTraces(forced_per_s), ForcedTraces(forced_per_s)
        self._clock_s = now_s

    def begin(self, path: str, traceparent: str | None, wants_times: bool = False) -> Kept:
        """Draws the place of a request that begins, below the client's span if `traceparent` names one, and decides
        whether it is sampled. A client that `wants_times` has it sampled, as far as clients may.
        """
        above = None if traceparent is None else context_of(traceparent)
        place = drawn_place(above)
        if place.parent_id is None:
            unforced = self._takes(None, place.trace_id, path)
            asked = wants_times
        else:
            asked = wants_times or self._takes(above, place.trace_id, path)
            # the client has chosen the trace's id, too
            unforced = asked and self._takes(None, random.getrandbits(128) or 1, path)
        return Kept(place, unforced or (asked and self._forced.take(self._clock_s())))

    def _takes(self, above: Context | None, trace_id: int, path: str) -> bool:
        return self._sampler.should_sample(above, trace_id, path).decision.is_sampled()

    def take(self, answered: Answered) -> Literal["taken", "dropped"] | None:
        """Takes over a request that has ended, if its trace is to be kept; else returns None. Returns "dropped" if
        there is no room.
        """
        kept = answered.kept.sampled or answered.has_failed
        if not kept and not (answered.has_missed and self._missed.take(self._clock_s())):
            return None
        return "taken" if self.put(partial(write, answered)) is None else "dropped"


def _sampler() -> Sampler:
    """Returns the sampler that OTEL_TRACES_SAMPLER names, else one that follows the client and draws `RATIO`."""
    if os.environ.get("OTEL_TRACES_SAMPLER"):
        return TracerProvider(shutdown_on_exit=False).sampler
    return ParentBased(TraceIdRatioBased(RATIO))
