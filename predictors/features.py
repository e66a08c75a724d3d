"""A feature tracker computes a request's features from earlier requests alone.

`FeatureTracker.arrive` reads only requests that arrived or finished before. Lengths enter by
`FeatureTracker.finish` alone, which its caller calls in order of time. So no feature can contain a request's own
output or anything later. A feature that the source lacks is NaN and never guessed.

Lengths are summarised per *scope*: all traffic, class, model, client, session, prompt, template, prompt-length
bucket, exact prompt length. A summary has the count, an exponentially weighted mean, and quantiles of a rolling
window; for some scopes also the window's distribution (`sketch.py`). Each scope has a table of bounded size, from
which the least recently used keys are dropped.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from predictors.protocol import Arrival, FeatureArray, Features, Outcome
from predictors.sketch import KNOTS, knots

FEATURES_VERSION = 1

_SECONDS_PER_DAY = 86_400.0
_BUCKETS = 16
# The number of recent lengths kept for each key of a scope.
_SCOPES: dict[str, int] = {
    "global": 512,
    "class": 256,
    "model": 256,
    "client": 1_024,
    "session": 16,
    "prompt": 16,
    "template": 64,
    "bucket": 128,
    "same_length": 32,
}
_STATS = ("count", "last", "ewma", "p10", "p50", "p90")

REQUEST_FEATURES = (
    "prompt_tokens",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop_strings",
    "choices",
    "structured_output",
    "turn",
    "session_gap_s",
    "session_prompt_growth_tokens",
    "arrival_rate_10s",
    "arrival_rate_60s",
    "arrival_gap_ewma_s",
    "prompt_tokens_ewma",
    "time_of_day_sin",
    "time_of_day_cos",
    "text_chars",
    "text_last_turn_chars",
    "text_question_marks",
    "text_code_marks",
    "text_list_marks",
    "text_requested_words",
)
# The scopes whose length distribution a request carries along (`sketch.py`), from broad to narrow.
SKETCH_SCOPES = ("client", "same_length", "template", "prompt")


def sketch_names(scope: str) -> tuple[str, ...]:
    """Returns the names of a scope's knots, in order. The feature `{scope}_weight` is the number of lengths behind
    them.
    """
    return tuple(f"{scope}_q{k:02d}" for k in range(KNOTS))


SCALAR_FEATURES: tuple[str, ...] = REQUEST_FEATURES + tuple(f"{s}_{k}" for s in _SCOPES for k in _STATS)
FEATURE_NAMES: tuple[str, ...] = SCALAR_FEATURES + tuple(
    name for s in SKETCH_SCOPES for name in (f"{s}_weight", *sketch_names(s))
)
# These features are output lengths in tokens.
LENGTH_FEATURES = frozenset(f"{s}_{k}" for s in _SCOPES for k in _STATS if k != "count")
# This count grows with the age of the tracker. It only distinguishes training from serving.
CLOCK_FEATURES = frozenset({"global_count"})
# Unless the training data spans several days, these features mean only "early" and "late".
TIME_FEATURES = frozenset({"time_of_day_sin", "time_of_day_cos"})


class _Lengths:
    """The statistics of the lengths of one key. They take O(window) memory; a new length costs an O(log window)
    search and two small memmoves.
    """

    __slots__ = ("_order", "_sorted", "_window", "count", "ewma", "last")

    def __init__(self, window: int) -> None:
        # a list, because a deque takes 0.6 kB for a single length
        self._order: list[int] = []
        self._sorted: list[int] = []
        self._window = window
        self.count = 0
        self.ewma = 0.0
        self.last = 0

    def add(self, tokens: int) -> None:
        if len(self._order) == self._window:
            old = self._order.pop(0)
            del self._sorted[bisect_left(self._sorted, old)]
        self._order.append(tokens)
        insort(self._sorted, tokens)
        self.count += 1
        # This is the plain mean until 1/count falls to the exponential weight, so that the first length is not
        # overweighted.
        weight = max(1.0 / self.count, 2.0 / (self._window + 1))
        self.ewma += weight * (tokens - self.ewma)
        self.last = tokens

    def stats(self) -> tuple[float, ...]:
        """Returns the values of `_STATS`, in that order."""
        top = len(self._sorted) - 1
        p10, p50, p90 = (float(self._sorted[round(q * top)]) for q in (0.1, 0.5, 0.9))
        return float(self.count), float(self.last), self.ewma, p10, p50, p90

    def sketch(self) -> list[float]:
        """Returns the number of lengths in the window, followed by their knots."""
        return [float(len(self._sorted)), *knots(self._sorted)]


_ABSENT = (math.nan,) * len(_STATS)
_NO_SKETCH = [0.0] + [math.nan] * KNOTS


class _Table:
    """A table from a scope's keys to their lengths. It holds at most `capacity` keys and drops the least recently
    updated first.
    """

    def __init__(self, window: int, capacity: int) -> None:
        self._window = window
        self._capacity = capacity
        self._rows: OrderedDict[str | int, _Lengths] = OrderedDict()

    def add(self, key: str | int | None, tokens: int) -> None:
        if key is None:
            return
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Lengths(self._window)
            if len(self._rows) > self._capacity:
                self._rows.popitem(last=False)
        self._rows.move_to_end(key)
        row.add(tokens)

    def stats(self, key: str | int | None) -> tuple[float, ...]:
        row = None if key is None else self._rows.get(key)
        return _ABSENT if row is None else row.stats()

    def sketch(self, key: str | int | None) -> list[float]:
        row = None if key is None else self._rows.get(key)
        return _NO_SKETCH if row is None else row.sketch()

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(frozen=True, slots=True)
class _SessionSeen:
    at_s: float
    prompt_tokens: int


class FeatureTracker:
    """A tracker turns arrivals into `Features` and learns from outcomes. The live router and replays both use this
    class.
    """

    def __init__(self, keys_per_scope: int = 20_000) -> None:
        """`keys_per_scope` bounds the memory: it is the largest number of keys kept for each scope (sessions,
        prompts, ...).
        """
        if keys_per_scope < 1:
            raise ValueError(f"keys_per_scope {keys_per_scope} must be at least 1")
        self._tables = {scope: _Table(window, keys_per_scope) for scope, window in _SCOPES.items()}
        self._sessions: OrderedDict[str, _SessionSeen] = OrderedDict()
        self._keys_per_scope = keys_per_scope
        self._arrivals: deque[float] = deque(maxlen=4_096)
        self._gap_ewma_s = math.nan
        self._prompt_ewma = math.nan
        self._prompt_order: deque[int] = deque()
        self._prompt_sorted: list[int] = []

    def arrive(self, arrival: Arrival) -> Features:
        """Returns the features of `arrival`, computed from earlier requests, and then adds `arrival` to the past."""
        values = [*self._request_values(arrival), *self._length_values(arrival)]
        self._remember(arrival)
        return Features(arrival=arrival, values=np.array(values, dtype=np.float32))

    def finish(self, outcome: Outcome) -> None:
        """Adds the length of a finished request. A censored outcome is ignored, because its length is only a lower
        bound.
        """
        if outcome.censored:
            return
        for scope, key in self._keys(outcome.arrival):
            self._tables[scope].add(key, outcome.output_tokens)

    def keys_held(self) -> int:
        """Returns the number of scope keys in memory, for a gauge."""
        return sum(len(table) for table in self._tables.values())

    def _keys(self, a: Arrival) -> tuple[tuple[str, str | int | None], ...]:
        return (
            ("global", ""),
            ("class", a.traffic_class),
            ("model", a.model),
            ("client", a.client),
            ("session", a.session),
            ("prompt", a.prompt_key),
            ("template", a.template_key),
            ("bucket", self._bucket(a.prompt_tokens)),
            ("same_length", a.prompt_tokens),
        )

    def _length_values(self, a: Arrival) -> Iterable[float]:
        keys = dict(self._keys(a))
        for scope, key in keys.items():
            yield from self._tables[scope].stats(key)
        for scope in SKETCH_SCOPES:
            yield from self._tables[scope].sketch(keys[scope])

    def _request_values(self, a: Arrival) -> tuple[float, ...]:
        s, t = a.sampling, a.text
        seen = None if a.session is None else self._sessions.get(a.session)
        angle = math.nan if a.wall_clock_s is None else 2 * math.pi * a.wall_clock_s / _SECONDS_PER_DAY
        return (
            float(a.prompt_tokens),
            _number(a.max_tokens),
            _number(s.temperature),
            _number(s.top_p),
            _number(s.top_k),
            _number(s.stop_strings),
            _number(s.choices),
            _number(s.structured_output),
            _number(a.turn),
            math.nan if seen is None else a.arrival_s - seen.at_s,
            math.nan if seen is None else float(a.prompt_tokens - seen.prompt_tokens),
            self._rate(a.arrival_s, 10.0),
            self._rate(a.arrival_s, 60.0),
            self._gap_ewma_s,
            self._prompt_ewma,
            math.sin(angle),
            math.cos(angle),
            _number(None if t is None else t.chars),
            _number(None if t is None else t.last_turn_chars),
            _number(None if t is None else t.question_marks),
            _number(None if t is None else t.code_marks),
            _number(None if t is None else t.list_marks),
            _number(None if t is None else t.requested_words),
        )

    def _rate(self, now_s: float, span_s: float) -> float:
        """Returns the arrivals per second in the last `span_s` seconds, or NaN before the first arrival. It is a
        lower bound if more than the 4,096 remembered arrivals came within the span.
        """
        if not self._arrivals:
            return math.nan
        return (len(self._arrivals) - bisect_right(self._arrivals, now_s - span_s)) / span_s

    def _bucket(self, prompt_tokens: int) -> int | None:
        """Returns the prompt's quantile bucket among the last 1,024 prompts, or None before there are four prompts
        per bucket.
        """
        n = len(self._prompt_sorted)
        return (
            None
            if n < 4 * _BUCKETS
            else _BUCKETS * bisect_left(self._prompt_sorted, prompt_tokens) // (n + 1)
        )

    def _remember(self, a: Arrival) -> None:
        if self._arrivals:
            gap_s = max(0.0, a.arrival_s - self._arrivals[-1])
            self._gap_ewma_s = (
                gap_s if math.isnan(self._gap_ewma_s) else 0.95 * self._gap_ewma_s + 0.05 * gap_s
            )
        # The search in `_rate` needs ascending times, so a time that goes back is raised to the one before.
        self._arrivals.append(max(a.arrival_s, self._arrivals[-1]) if self._arrivals else a.arrival_s)
        old = self._prompt_ewma
        self._prompt_ewma = a.prompt_tokens if math.isnan(old) else 0.98 * old + 0.02 * a.prompt_tokens
        if len(self._prompt_order) == 1_024:
            del self._prompt_sorted[bisect_left(self._prompt_sorted, self._prompt_order.popleft())]
        self._prompt_order.append(a.prompt_tokens)
        insort(self._prompt_sorted, a.prompt_tokens)
        if a.session is not None:
            self._sessions[a.session] = _SessionSeen(a.arrival_s, a.prompt_tokens)
            self._sessions.move_to_end(a.session)
            if len(self._sessions) > self._keys_per_scope:
                self._sessions.popitem(last=False)


def _number(value: float | bool | None) -> float:
    return math.nan if value is None else float(value)


def replay(outcomes: Sequence[Outcome], tracker: FeatureTracker | None = None) -> list[Features]:
    """Returns the features that each request would have had at its arrival, in the order of `outcomes`.

    Arrivals and finishes are merged by time. A finish at the same time as an arrival comes after it.
    """
    tracker = tracker or FeatureTracker()
    arriving = sorted(range(len(outcomes)), key=lambda i: outcomes[i].arrival.arrival_s)
    finishing = sorted(range(len(outcomes)), key=lambda i: outcomes[i].finish_s)
    made: dict[int, Features] = {}
    done = 0
    for i in arriving:
        while done < len(finishing) and outcomes[finishing[done]].finish_s < outcomes[i].arrival.arrival_s:
            tracker.finish(outcomes[finishing[done]])
            done += 1
        made[i] = tracker.arrive(outcomes[i].arrival)
    for i in finishing[done:]:
        tracker.finish(outcomes[i])
    return [made[i] for i in range(len(outcomes))]


def stack(features: Sequence[Features]) -> FeatureArray:
    """Returns the feature values of a batch, float32 (n, len(FEATURE_NAMES))."""
    if not features:
        return np.empty((0, len(FEATURE_NAMES)), dtype=np.float32)
    return np.concatenate([f.values for f in features]).reshape(len(features), -1)
