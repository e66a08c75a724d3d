"""The view of a scaling policy: frozen windows of each request class, and every engine.

A request misses its objective if it was late, refused, expired or failed. A request that an engine served in its first
`settle_s` seconds does not count towards attainment: caches are cold and connections new, and more engines would not
help. Windows that nobody reported are None, which is not the same as windows without arrivals: a policy holds in the
first case and may shrink in the second.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from policies.engine_model.timing import TimingProfile
from policies.routing.params import BadParameter
from policies.state.views import RequestId, Role


class Duty(StrEnum):
    """The part that an engine plays for the fleet.

    Only ACTIVE engines get requests. A STARTING engine is not ready yet, a WARM engine is ready and gets no requests,
    and a DRAINING engine finishes what it has and leaves.
    """

    STARTING = "starting"
    WARM = "warm"
    ACTIVE = "active"
    DRAINING = "draining"


class Outcome(StrEnum):
    """How a request ended, for the attainment of its class."""

    SERVED = "served"
    REFUSED = "refused"
    EXPIRED = "expired"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine. `role` is the role that it has or has been given, also while it still finishes work of another.

    `since_s` is the time at which its duty began. `distance` orders warm engines by nearness to their peers (0 is the
    nearest; from the network oracle). `score` is FlowKV's load score.
    """

    engine: str
    role: Role
    duty: Duty
    since_s: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    score: float = 0.0
    distance: float = 0.0


@dataclass(frozen=True, slots=True)
class ClassWindow:
    """One request class in one window of `length_s` seconds.

    `prompt_tokens` are those of the arrivals that must be computed, and `hit_tokens` those found in prefix caches.
    `forecast_tokens` is the sum of the arrivals' expected output lengths. `met` and `missed` count the requests that
    ended, `refused`, `expired` and `failed` those among the missed. `output_tokens` is the sum over the `ended` served
    ones. An objective that is None was not asked for; a percentile that is None was not measured.
    """

    name: str
    length_s: float
    arrived: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    forecast_tokens: float = 0.0
    met: int = 0
    missed: int = 0
    refused: int = 0
    expired: int = 0
    failed: int = 0
    ended: int = 0
    output_tokens: int = 0
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    ttft_p90_s: float | None = None
    tpot_p90_s: float | None = None


@dataclass(frozen=True, slots=True)
class Leads:
    """Seconds that each way to more capacity takes, as measured: a role switch, an activation, a start from nothing."""

    switch_s: float = 1.0
    activate_s: float = 1.0
    start_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("switch_s", "activate_s", "start_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise BadParameter(f"leads: {name} is {value!r}: it must be a number >= 0")


class Room(NamedTuple):
    """The sequences that one engine decodes at once at most, and the KV tokens that it holds."""

    slots: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Capability:
    """The abilities of one engine: its timing profile, whatever its role, and the slots and KV tokens of a decode
    engine. `colocated` has those of a colocated engine; None: they are the same.
    """

    profile: TimingProfile
    slots: int = 256
    kv_tokens: int = 500_000
    colocated: Room | None = None

    def __post_init__(self) -> None:
        for room in (Room(self.slots, self.kv_tokens), self.colocated or Room(1, 1)):
            if min(room) < 1:
                raise BadParameter(
                    f"capability: slots {room.slots} and kv_tokens {room.kv_tokens} must be >= 1"
                )

    def of_colocated(self) -> "Capability":
        """Returns the abilities with the slots and KV tokens of a colocated engine."""
        return self if self.colocated is None else Capability(self.profile, *self.colocated)


@dataclass(frozen=True, slots=True)
class Observation:
    """All that a policy sees at `now_s`.

    `window` is the number of the last complete window, counted from 0; a policy learns from each number once.
    `windows` has that window by class, or None where nothing was reported. `queued` requests wait for a prefill engine
    and `pooled` ones for a decode engine; the oldest has waited for `oldest_queued_s`, `oldest_pooled_s`. Unless
    `fitted`, the profile in `capability` is a guess, in all or some of its coefficients, and no plan may depend on it.
    `part_arrived` requests have come in the `part_s` seconds since that window ended, which begin the next one.
    """

    now_s: float
    window: int
    windows: tuple[ClassWindow, ...] | None
    engines: tuple[EngineView, ...]
    capability: Capability
    leads: Leads = field(default_factory=Leads)
    queued: int = 0
    pooled: int = 0
    oldest_queued_s: float = 0.0
    oldest_pooled_s: float = 0.0
    fitted: bool = True
    part_arrived: int = 0
    part_s: float = 0.0

    @property
    def arrived(self) -> int:
        """The arrivals of all classes in the last window; 0 where nothing was reported."""
        return sum(w.arrived for w in self.windows or ())

    @property
    def rate_per_s(self) -> float | None:
        """Requests per second of all classes in the last window, or None where nothing was reported."""
        if not self.windows:
            return None if self.windows is None else 0.0
        return self.arrived / max(w.length_s for w in self.windows)

    @property
    def prompts_waiting(self) -> int:
        """The requests whose prompt nobody computes yet: those at the router and those in engines' own queues."""
        return self.queued + sum(e.waiting for e in self.engines if e.role is not Role.DECODE)

    @property
    def streams_waiting(self) -> int:
        """The requests that wait for a decode slot: those at the router and those in decode engines' own queues."""
        return self.pooled + sum(e.waiting for e in self.engines if e.role is Role.DECODE)

    def with_duty(self, *duties: Duty) -> list[EngineView]:
        """Returns the engines that have one of `duties`, in the observation's order."""
        return [e for e in self.engines if e.duty in duties]


def attainment(windows: Iterable[ClassWindow], least: int = 1) -> float | None:
    """Returns the lowest share of met objectives of any class with at least `least` ended requests.

    Where no class has as many, it is the share over all classes, or None if nothing has ended.
    """
    seen = [(w.met, w.met + w.missed) for w in windows]
    shares = [met / ended for met, ended in seen if ended >= least]
    total = sum(ended for _, ended in seen)
    if shares:
        return min(shares)
    return sum(met for met, _ in seen) / total if total else None


@dataclass(slots=True)
class EngineAges:
    """For each attempt, how long its engines had been active in their role when it was given to them: the least of both
    counts. What becomes of an engine afterwards changes nothing. Times are in seconds.
    """

    _ages: dict[RequestId, float] = field(default_factory=dict)

    def prefills(self, attempt_id: RequestId, active_s: float) -> None:
        """Notes the engine that computes an attempt's prompt, perhaps once more; a colocated one decodes it, too."""
        self._ages[attempt_id] = active_s

    def decodes(self, attempt_id: RequestId, active_s: float) -> None:
        """Notes the engine that decodes an attempt."""
        self._ages[attempt_id] = min(active_s, self._ages.get(attempt_id, active_s))

    def take(self, attempt_id: RequestId) -> float:
        """Forgets an attempt and returns what was noted; infinity where nothing was."""
        return self._ages.pop(attempt_id, math.inf)


@dataclass(slots=True)
class _Sums:
    """The counts of one class in the window that is being filled."""

    window: ClassWindow
    ttfts: list[float] = field(default_factory=list)
    tpots: list[float] = field(default_factory=list)

    def add(self, **more: float) -> None:
        now = {name: getattr(self.window, name) + value for name, value in more.items()}
        self.window = replace(self.window, **now)


@dataclass(slots=True)
class Observer:
    """Counts requests into windows of `length_s` seconds and freezes the last complete one.

    All times are seconds on the caller's clock and must not fall. Whoever reports calls `heard` even when there is no
    traffic; after `silent_s` seconds without any report the windows are None.
    """

    length_s: float = 10.0
    settle_s: float = 5.0
    silent_s: float = 5.0
    began_s: float = 0.0
    _heard_s: float | None = None
    _number: int = 0
    _sums: dict[str, _Sums] = field(default_factory=dict)
    _known: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    _last: deque[tuple[int, tuple[ClassWindow, ...] | None]] = field(default_factory=lambda: deque(maxlen=1))

    def __post_init__(self) -> None:
        if min(self.length_s, self.silent_s) <= 0.0 or self.settle_s < 0.0:
            raise BadParameter(
                "observer: length_s and silent_s must be > 0, settle_s >= 0; give all three in seconds"
            )

    def heard(self, now_s: float) -> None:
        """Notes a report without a request in it."""
        self._turn(now_s)
        self._heard_s = now_s

    def arrived(
        self,
        name: str,
        now_s: float,
        prompt_tokens: int,
        hit_tokens: int = 0,
        forecast_tokens: float = 0.0,
        ttft_slo_s: float | None = None,
        tpot_slo_s: float | None = None,
    ) -> None:
        """Counts a request of the class `name`; `prompt_tokens` includes the `hit_tokens` found in a prefix cache."""
        if not 0 <= hit_tokens <= prompt_tokens or not math.isfinite(forecast_tokens):
            raise BadParameter(
                f"observer: {prompt_tokens} prompt, {hit_tokens} hit, {forecast_tokens} forecast tokens: impossible;"
                " drop this request"
            )
        self.heard(now_s)
        self._known[name] = (ttft_slo_s, tpot_slo_s)
        self._of(name).add(
            arrived=1,
            prompt_tokens=prompt_tokens - hit_tokens,
            hit_tokens=hit_tokens,
            forecast_tokens=forecast_tokens,
        )

    def closed(
        self,
        name: str,
        now_s: float,
        outcome: Outcome,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        output_tokens: int = 0,
        engine_active_s: float = math.inf,
    ) -> None:
        """Counts the end of a request; `engine_active_s` is what `EngineAges` noted of the engines that served it."""
        self.heard(now_s)
        sums = self._of(name)
        if outcome is not Outcome.SERVED:
            sums.add(missed=1, **{outcome.value: 1})
            return
        sums.add(ended=1, output_tokens=output_tokens)
        if engine_active_s < self.settle_s:
            return
        ttft_slo_s, tpot_slo_s = self._known.get(name, (None, None))
        late = _above(ttft_s, ttft_slo_s) or _above(tpot_s, tpot_slo_s)
        sums.add(met=int(not late), missed=int(late))
        if ttft_s is not None:
            sums.ttfts.append(ttft_s)
        if tpot_s is not None:
            sums.tpots.append(tpot_s)

    def freeze(
        self,
        now_s: float,
        engines: tuple[EngineView, ...],
        capability: Capability,
        leads: Leads | None = None,
        queued: int = 0,
        pooled: int = 0,
        oldest_queued_s: float = 0.0,
        oldest_pooled_s: float = 0.0,
    ) -> Observation:
        """Returns the observation at `now_s`. Before the first complete window its windows are None."""
        self._turn(now_s)
        number, windows = self._last[0] if self._last else (-1, None)
        if self._heard_s is None or now_s - self._heard_s > self.silent_s:
            windows = None
        return Observation(
            now_s,
            number,
            windows,
            engines,
            capability,
            leads or Leads(),
            queued,
            pooled,
            oldest_queued_s,
            oldest_pooled_s,
            part_arrived=sum(sums.window.arrived for sums in self._sums.values()),
            part_s=max(0.0, now_s - self.began_s - self._number * self.length_s),
        )

    def _of(self, name: str) -> _Sums:
        if name not in self._sums:
            ttft_slo_s, tpot_slo_s = self._known.get(name, (None, None))
            self._sums[name] = _Sums(
                ClassWindow(name, self.length_s, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s)
            )
        return self._sums[name]

    def _turn(self, now_s: float) -> None:
        """Closes the windows that have ended by `now_s`; windows in which nobody reported anything are None."""
        number = int((now_s - self.began_s) // self.length_s)
        if number <= self._number:
            return
        start_s = self.began_s + self._number * self.length_s
        spoken = self._heard_s is not None and self._heard_s >= start_s
        windows = tuple(_frozen(sums) for sums in self._sums.values()) if spoken else None
        if number > self._number + 1:
            # A later window, of which this one is not the neighbour, passed without any report.
            windows = None
        self._last.append((number - 1, windows))
        self._number = number
        self._sums = {}
        for name in self._known:
            self._of(name)


def _frozen(sums: _Sums) -> ClassWindow:
    return replace(sums.window, ttft_p90_s=_p90(sums.ttfts), tpot_p90_s=_p90(sums.tpots))


def _p90(values: list[float]) -> float | None:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1] if values else None


def _above(value_s: float | None, slo_s: float | None) -> bool:
    return value_s is not None and slo_s is not None and value_s > slo_s
