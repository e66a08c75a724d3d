"""Sluice's scaling policy: prefill, decode and colocated engines enumerated together, and the cheapest change wins.

    demand_up    = max(upper(lead of the fast ways, quantile), burst) (1 + headroom)         requests/s
    demand_down  = peak(until a start could end, quantile) (1 + headroom) (1 + band)
    backlog      = late prompts / drain_s before prefill, streams waiting / drain_s before decode
    late prompts = prompts waiting at router and engines, less those that the engines compute within the TTFT slack
    held         = sum over decode engines of max(running / slots, KV in use) / kv_share, mean of 10 s, rounded up
    reach        = the greatest decode(D) + colocated(C) within bounds and budget, beside the fewest that prefill
    carries(P, D, C, r)  :  prefill(P) + colocated(C) >= r + backlog,
                            decode(D) + colocated(C) >= min(r + backlog, reach),  D >= held

Demands above `reach` are cut to it, since prompts that prefill computed beyond it would only wait for decode. That is
not done where the budget has prefill and decode share engines, or where prefill cannot carry `reach`. Where bounds or
budget do not carry demand_up, D need not be more than 1.25 held + 1: lengths of outputs are learned when they end, long
after a load has changed, and prefill may need the engines now.

While what is wanted carries demand_up, nothing grows. Otherwise, for every number C of colocated engines, the fewest
P and D that carry demand_up; a role that has more than it needs for demand_up (1 + band) gives engines by role
switch. The cheapest of all C is taken:

    cost = added engines + switch_cost * switches + activate_cost * activations + start_cost * starts

Where bounds or budget are short, the greatest demand that they carry takes the place of demand_up. Where they do not
carry the backlog alone, C is the greatest. Engines go when fewer have carried demand_down for `calm_s` seconds without
a break; the fewest that carry it stay. A step changes at most `limits.step` engines; after a growth nothing shrinks for
`cool_down_s`, after a role switch no role switches back for `switch_pause_s`.

`burst` is the last window's rate where its count exceeds n + k sqrt(n) + (k^2 - 1) / 6 with k = `burst_deviations`,
Cornish and Fisher's quantile of a Poisson count; n is what the least level after any of the last three windows gives,
since a burst raises the level. From `burst_part_s` on, the part of a window that has passed is looked at in the same
way, so that a burst need not wait for the end of its window.

Lateness that is proven (`lateness`, with 1 - `attain` allowed) raises the headroom by `headroom_gain` times the share
of late requests beyond the allowed one, within `headroom_most`; then the evidence begins anew. While attainment holds,
the headroom falls by `headroom_relax` an hour. The headroom of the beginning is a guess: over the first 400 requests
that are judged it falls to 0, or to what is left of it when lateness is proven.

The headroom is for engines that carry less than is known of them, so lateness that has another cause is not judged:
that of a window after which the policy finds its engines too few; that of requests which came before the wanted engines
served, and end `drain_s` and one stream (output * TPOT) after that at the latest; and any while an objective is
infeasible.

Noise of counting is no change: a mean length is that of the last 400 requests or so. The mean of the last windows takes
its place where it is below by k = 5 of its standard errors, sqrt(spread g / ((2 - g) n)) for n requests a window and a
gain g, or above by k + skewness (k^2 - 1) / 6 of them, Cornish and Fisher's quantile, since long requests are rare:

    skewness = (3 c + c^3) / sqrt(n) g^2 / (3 - 3 g + g^2) ((2 - g) / g)^1.5     lognormal lengths, c = sqrt(spread)

`spread` is the variance of one length in units of the squared mean, learned from the windows' deviations.

Without reports, or before the first window, the wanted counts stay as they are (hold). Without arrivals the demand
falls with the forecast, and the counts to their minimum (shrink). Deviations: lengths are means over all classes,
weighted by arrivals; objectives are the strictest of any class with at least `class_share` of the arrivals. Not
claimed: optimal transitions over several steps; engines of different hardware; a headroom for a fleet that never stands
for as long as requests take.
"""

import math
from dataclasses import dataclass, field, replace
from operator import gt, lt
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt

from policies.routing.params import BadParameter, Number, Whole, check
from policies.scaling import warm_pool
from policies.scaling.base import Counts, Limits, Plan, Step, serving_now, stepped
from policies.scaling.capacity import Demand, Margins, Table, prompt_s, table
from policies.scaling.forecast import Forecast, ForecastState
from policies.scaling.lateness import Lateness
from policies.scaling.moves import moves
from policies.scaling.observation import ClassWindow, Duty, Observation, attainment
from policies.state.views import Role

IntArray = npt.NDArray[np.int64]
_HALVINGS = 24
# ASSUMPTION: the requests of a window that weigh as much as all that came before in the recent mean; lengths with a
# coefficient of variation of 0.4 have a mean within 10 % then.
_EVIDENCE = 20.0
# ASSUMPTION: the requests that a mean rests on at most; with that coefficient it deviates by 0.4 / sqrt(2 * 400),
# which is 1.4 %.
_MEMORY = 400.0
# ASSUMPTION: standard errors by which the recent mean must differ if lengths are not skewed.
_CHANGED = 5.0
# ASSUMPTION: the headroom of the beginning, and the judged requests over which it falls to 0: as many as a mean length
# rests on, of which 99 % in time are 396 ± 2.
_FIRST_HEADROOM, _FIRST_JUDGED = 0.1, 400
# ASSUMPTION: weight of a window in the variance of one length, which one window raises by 16 % at most; its least value
# is that of a coefficient of variation of 0.1, its first one that of 0.5.
_SPREAD_GAIN, _SPREAD_MOST, _SPREAD_LEAST, _SPREAD_FIRST = 0.02, 9.0, 0.01, 0.25
# ASSUMPTION: the last levels of which the least is compared with a window's rate: the two first windows of a burst are
# compared with the level before it.
_BEFORE = 3
# ASSUMPTION: where engines are short, decode gets what it needs for this many times what it holds, and one engine more.
_AHEAD = 1.25
# ASSUMPTION: seconds over which occupied decode engines are averaged, so that no single peak of a batch adds an engine.
_FULL_S = 10.0


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence for a mean length: the mean of the last windows in tokens, the number of requests that it rests on
    (0 before the first), and the variance of one length in units of the squared mean.
    """

    recent: float = 0.0
    weight: float = 0.0
    spread: float = _SPREAD_FIRST

    def learned(self, known: float, mean: float, number: int, least_gain: float) -> "tuple[float, Evidence]":
        """Returns the mean that was `known` (tokens), and its evidence, after a window of `number` requests (at least
        1) with the mean `mean`. Noise moves it little; a significant change replaces it by the recent mean.
        """
        if not self.weight:
            return mean, Evidence(mean, float(number), self.spread)
        gain = max(least_gain, number / (number + _EVIDENCE))
        recent = self.recent + gain * (mean - self.recent)
        error = known * math.sqrt(self.spread * gain / ((2.0 - gain) * number))
        rise = _CHANGED + self._skewness(number, gain) * (_CHANGED**2 - 1.0) / 6.0
        changed = recent - known > rise * error or known - recent > _CHANGED * error
        value = recent if changed else known + number / (number + self.weight) * (mean - known)
        weight = _EVIDENCE if changed else min(_MEMORY, self.weight + number)
        deviation = number * ((mean - known) / max(1.0, known)) ** 2
        spread = self.spread + _SPREAD_GAIN * (min(deviation, _SPREAD_MOST * self.spread) - self.spread)
        return value, Evidence(recent, weight, max(_SPREAD_LEAST, spread))

    def _skewness(self, number: int, gain: float) -> float:
        """Returns the skewness of the recent mean of lognormal lengths, for windows of `number` requests."""
        cv = math.sqrt(self.spread)
        of_weights: float = gain**2 / (3.0 - 3.0 * gain + gain**2) * ((2.0 - gain) / gain) ** 1.5
        return (3.0 * cv + cv**3) / math.sqrt(number) * of_weights


@dataclass(frozen=True, slots=True)
class Lengths:
    """Means of the requests seen: `weight` is 0 before the first. An objective of None was never asked for."""

    weight: float = 0.0
    prompt_tokens: float = 0.0
    context_tokens: float = 0.0
    output_tokens: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    prompt: Evidence = field(default_factory=Evidence)
    context: Evidence = field(default_factory=Evidence)
    output: Evidence = field(default_factory=Evidence)


def demand_of(known: Lengths) -> Demand:
    """Returns the mean request with these lengths and objectives."""
    return Demand(
        known.prompt_tokens, known.context_tokens, max(1.0, known.output_tokens), known.ttft_s, known.tpot_s
    )


@dataclass(frozen=True, slots=True)
class JointState:
    """The memory of the policy: forecast, lengths, attainment, and when it last changed what. The wanted engines serve
    since `stood_since_s`, and no others, and have been enough by what is known (None: they do not). `judged` of the
    first `_FIRST_JUDGED` requests have been judged.
    """

    window: int = -1
    forecast: ForecastState = field(default_factory=ForecastState)
    lengths: Lengths = field(default_factory=Lengths)
    attained: float | None = None
    headroom: float = _FIRST_HEADROOM
    judged: int = 0
    late: tuple[Lateness, ...] = ()
    wanted: Counts | None = None
    warm: int = 0
    stood_since_s: float | None = None
    grown_s: float = -math.inf
    switched_s: float = -math.inf
    calm_since_s: float | None = None
    idle_since_s: float | None = None
    full: float = 0.0
    looked_s: float | None = None


@dataclass(frozen=True, slots=True)
class Joint:
    """Enumerates the roles jointly and takes the cheapest change that carries the forecast demand."""

    limits: Limits = field(default_factory=Limits)
    forecast: Forecast = field(default_factory=Forecast)
    margins: Margins = field(default_factory=Margins)
    # ASSUMPTION: all defaults below, but for the attainment that the issue asks for
    quantile: Annotated[float, Number(low=0.5, high=0.999)] = 0.9
    """Quantile of the forecast that the serving engines carry."""
    warm_quantile: Annotated[float, Number(low=0.5, high=0.999)] = 0.99
    """Quantile of the forecast at the lead of a start that serving and warm engines carry."""
    band: Annotated[float, Number(low=0.0, high=1.0)] = 0.15
    """Hysteresis: what goes must leave this much more than the demand."""
    calm_s: Annotated[float, Number(low=0.0, unit="s")] = 600.0
    """Time for which fewer engines must have been enough before any goes."""
    cool_down_s: Annotated[float, Number(low=0.0, unit="s")] = 120.0
    """Time after a growth in which nothing shrinks."""
    switch_pause_s: Annotated[float, Number(low=0.0, unit="s")] = 30.0
    """Time after a role switch in which no engine switches."""
    drain_s: Annotated[float, Number(above=0.0, unit="s")] = 30.0
    """Time in which the requests that wait now shall have been served besides the demand."""
    burst_deviations: Annotated[float, Number(low=1.0)] = 4.75
    """Deviations above the level beyond which a window is a burst; by chance one window in a million is."""
    burst_part_s: Annotated[float, Number(above=0.0, unit="s")] | None = 2.0
    """Time from which the part of a window that has passed may be a burst; None: only whole windows are. Each look at a
    part is one more chance of one in a million."""
    attain: Annotated[float, Number(above=0.0, high=1.0)] = 0.99
    """Share of the requests that shall meet their objectives."""
    headroom_most: Annotated[float, Number(low=0.0, high=4.0)] = 0.5
    headroom_gain: Annotated[float, Number(low=0.0)] = 0.5
    """Rise of the headroom for each proof of lateness, in times of the share of late requests beyond the allowed
    one."""
    headroom_relax: Annotated[float, Number(low=0.0)] = 0.05
    """Fall of the headroom in an hour of attainment."""
    least_ended: Annotated[int, Whole(1)] = 20
    """Ended requests of a class from which its attainment counts alone."""
    class_share: Annotated[float, Number(low=0.0, high=1.0)] = 0.01
    switch_cost: Annotated[float, Number(low=0.0)] = 0.2
    activate_cost: Annotated[float, Number(low=0.0)] = 0.1
    start_cost: Annotated[float, Number(low=0.0)] = 0.5
    gain: Annotated[float, Number(above=0.0, high=1.0)] = 0.1
    """Weight of the newest window in attainment, and its least weight in the recent mean lengths."""
    name: ClassVar[str] = "joint"

    def __post_init__(self) -> None:
        check(self)

    @property
    def _first_headroom(self) -> float:
        return min(_FIRST_HEADROOM, self.headroom_most)

    def initial(self) -> JointState:
        return JointState(headroom=self._first_headroom)

    def step(self, seen: Observation, state: JointState) -> Step:
        held = self._filled(seen, self._stood(seen, self._held(seen, state)))
        if seen.windows is None:
            return self._planned(seen, held, ("no report: hold",))
        state = self._learned(seen, held)
        if not state.lengths.weight:
            return self._planned(seen, state, ("no request yet: hold",))
        return _Look(self, seen, state).decide(new_window=state.window != held.window)

    def _held(self, seen: Observation, state: JointState) -> JointState:
        """Returns the state with wanted counts; at the first step they are the present ones."""
        if state.wanted is not None:
            return state
        wanted, warm = self.limits.kept(serving_now(seen), len(seen.with_duty(Duty.WARM)))
        return replace(state, wanted=wanted, warm=warm)

    def _stood(self, seen: Observation, state: JointState) -> JointState:
        """Returns the state with the time since which the wanted engines serve, and no others."""
        if state.wanted != serving_now(seen):
            return replace(state, stood_since_s=None)
        if state.stood_since_s is None:
            return replace(state, stood_since_s=seen.now_s)
        return state

    def _filled(self, seen: Observation, state: JointState) -> JointState:
        """Returns the state with the number of decode engines that the running streams fill, a mean over `_FULL_S`.
        Raises BadParameter for a report that is no number.

        An output's length is known only when it ends, but it holds a slot and KV at once.
        """
        slots, now_s = seen.capability.slots, seen.now_s
        decoders = (e for e in seen.engines if e.role is Role.DECODE and e.running)
        full = sum(max(e.running / slots, e.kv_usage) for e in decoders) / self.margins.kv_share
        if not math.isfinite(full):
            # a mean would never be a number again
            raise BadParameter(f"policy joint: decode engines that are {full} full: drop this report")
        if state.looked_s is not None:
            share = 1.0 - math.exp(-max(0.0, now_s - state.looked_s) / _FULL_S)
            full = state.full + share * (full - state.full)
        return replace(state, full=full, looked_s=now_s)

    def _planned(self, seen: Observation, state: JointState, reasons: tuple[str, ...]) -> Step:
        assert state.wanted is not None
        plan = Plan(state.wanted, state.warm, moves(seen, state.wanted, state.warm))
        return Step(plan, state, reasons)

    def _learned(self, seen: Observation, state: JointState) -> JointState:
        """Returns the state with what a new window teaches; each window is used once."""
        rate, windows = seen.rate_per_s, seen.windows
        if seen.window <= state.window or rate is None or windows is None:
            return state
        length_s = max((w.length_s for w in windows), default=1.0)
        return replace(
            self._attained(windows, length_s, state),
            window=seen.window,
            forecast=self.forecast.observed(state.forecast, rate, length_s),
            lengths=self._lengths(windows, state.lengths),
        )

    def carried_by(self, seen: Observation, lengths: Lengths) -> Table:
        """Returns what engines of each role carry of requests with these lengths and objectives."""
        return table(seen.capability, demand_of(lengths), max(self.limits.most), self.margins)

    def _attained(self, windows: tuple[ClassWindow, ...], length_s: float, state: JointState) -> JointState:
        """Returns the state with the attainment after a new window, and with less headroom while it holds."""
        share = attainment(windows, self.least_ended)
        if share is None:
            return state
        if not math.isfinite(share):
            raise BadParameter(f"policy joint: an attainment of {share}: drop this report")
        attained = share if state.attained is None else state.attained + self.gain * (share - state.attained)
        fall = self.headroom_relax * length_s / 3600.0 if attained >= self.attain else 0.0
        return replace(self._with_headroom(state, -fall), attained=attained)

    def _own_from_s(self, state: JointState) -> float:
        """Returns the time from which the requests that end have come to the engines that serve now; infinity while
        these are not the wanted ones. Without an objective of TPOT the time of a stream is not known, and is left out.
        """
        if state.stood_since_s is None:
            return math.inf
        stream_s = state.lengths.output_tokens * (state.lengths.tpot_s or 0.0)
        return state.stood_since_s + self.drain_s + stream_s

    def judged(self, seen: Observation, state: JointState) -> JointState:
        """Returns the state after a new window in which the engines were enough, as far as the policy knows."""
        windows = seen.windows or ()
        length_s = max((w.length_s for w in windows), default=0.0)
        if seen.now_s - length_s < self._own_from_s(state):
            return state
        ended = min(sum(w.met + w.missed for w in windows), _FIRST_JUDGED - state.judged)
        state = self._with_headroom(state, -self._first_headroom * ended / _FIRST_JUDGED)
        state = replace(state, judged=state.judged + ended)
        allowed, known = 1.0 - self.attain, {one.name: one for one in state.late}
        for w in windows:
            before = known.get(w.name, Lateness(w.name))
            known[w.name] = before.after(w.missed, w.met + w.missed, allowed)
        most = max((one.share - allowed for one in known.values() if one.proven), default=None)
        if most is not None:
            # what is left of the first headroom is needed, too
            state = replace(self._with_headroom(state, self.headroom_gain * most), judged=_FIRST_JUDGED)
        late = tuple(one for one in known.values() if one.surplus > 0.0 and not one.proven)
        return replace(state, late=late)

    def _with_headroom(self, state: JointState, change: float) -> JointState:
        headroom = max(0.0, min(self.headroom_most, state.headroom + change))
        return replace(state, headroom=headroom)

    def _lengths(self, windows: tuple[ClassWindow, ...], known: Lengths) -> Lengths:
        arrived = sum(w.arrived for w in windows)
        if not arrived:
            return known
        prompt = sum(w.prompt_tokens for w in windows) / arrived
        context = sum(w.prompt_tokens + w.hit_tokens for w in windows) / arrived
        ended, true = sum(w.ended for w in windows), sum(w.output_tokens for w in windows)
        forecast = sum(w.forecast_tokens for w in windows) / arrived
        # The true lengths are those of requests that came earlier; where there are none, the forecasts stand for them.
        output = true / ended if ended else forecast
        counted = [w for w in windows if w.arrived >= self.class_share * arrived]
        ttfts = [w.ttft_slo_s for w in counted if w.ttft_slo_s is not None]
        tpots = [w.tpot_slo_s for w in counted if w.tpot_slo_s is not None]
        prompt_tokens, of_prompt = known.prompt.learned(known.prompt_tokens, prompt, arrived, self.gain)
        context_tokens, of_context = known.context.learned(known.context_tokens, context, arrived, self.gain)
        output_tokens, of_output = known.output_tokens, known.output
        if output:
            output_tokens, of_output = of_output.learned(output_tokens, output, ended or arrived, self.gain)
        return Lengths(
            known.weight + arrived,
            prompt_tokens,
            context_tokens,
            output_tokens,
            min(ttfts) if ttfts else known.ttft_s,
            min(tpots) if tpots else known.tpot_s,
            of_prompt,
            of_context,
            of_output,
        )


class _Look:
    """One decision of the policy, with what it computes once: table, demands, backlog."""

    def __init__(self, policy: Joint, seen: Observation, state: JointState) -> None:
        assert state.wanted is not None
        self.policy, self.seen, self.state = policy, seen, state
        self.wanted: Counts = state.wanted
        self.limits = policy.limits
        self.demand = demand_of(state.lengths)
        self.table: Table = policy.carried_by(seen, state.lengths)
        self.backlog = (self._late() / policy.drain_s, seen.streams_waiting / policy.drain_s)
        full, limits = state.full, self.limits
        self.held = min(limits.decode_max, math.ceil(full - 1e-9))
        # one above the table: nothing is waived
        self.enough = len(self.table.decode)
        self.reach = self._reach()
        self.up, self.down, self.later = self._demands()
        shared = limits.decode_max + limits.colocated_max + limits.prefill_min >= limits.budget
        if not shared and self.fits(min(self.up, self.reach)).any():
            self.up, self.down, self.later = (min(r, self.reach) for r in (self.up, self.down, self.later))
        if not self.fits(self.up).any():
            self.enough = math.ceil(_AHEAD * full) + 1

    def _late(self) -> float:
        """Returns the waiting prompts that the wanted engines do not compute within TTFT; without TTFT all that wait.

        Some prompts wait in every queue; counting those as demand would grow a fleet that is in time.
        """
        waiting, ttft_s, profile = self.seen.prompts_waiting, self.demand.ttft_s, self.seen.capability.profile
        service_s = prompt_s(profile, self.demand)
        if ttft_s is None:
            return waiting
        slack_s = max(0.0, ttft_s - service_s)
        return max(0.0, waiting - (self.wanted.prefill + self.wanted.colocated) * slack_s / service_s)

    def _demands(self) -> tuple[float, float, float]:
        """Returns the requests/s that serving engines must carry, that they must carry before any goes, and that
        serving and warm ones must carry when a start would end.
        """
        policy, seen, state = self.policy, self.seen, self.state
        length_s = max((w.length_s for w in seen.windows or ()), default=1.0)
        fast_s = max(seen.leads.switch_s, seen.leads.activate_s)
        fast, slow = (max(1, math.ceil(s / length_s)) for s in (fast_s, seen.leads.start_s))
        forecast, known = policy.forecast, state.forecast
        up = max(
            forecast.upper(known, fast, policy.quantile, length_s),
            self._burst(seen.rate_per_s or 0.0, length_s),
        )
        if policy.burst_part_s is not None and seen.part_s >= policy.burst_part_s:
            up = max(up, self._burst(seen.part_arrived / seen.part_s, seen.part_s))
        room = 1.0 + state.headroom
        down = max(up, forecast.peak(known, slow, policy.quantile, length_s)) * room * (1.0 + policy.band)
        return up * room, down, max(up, forecast.peak(known, slow, policy.warm_quantile, length_s)) * room

    def _burst(self, rate: float, seconds: float) -> float:
        """Returns the rate of a window, or of a part of one, that is `seconds` long, if it is a burst; else 0."""
        known, k = self.state.forecast, self.policy.burst_deviations
        level = min((level for level, _ in known.past[-_BEFORE:]), default=known.level)
        count = max(1.0, level * seconds)
        allowed = (count + k * math.sqrt(count) + (k * k - 1.0) / 6.0) / seconds
        return rate if rate > allowed else 0.0

    # ------------------------------------------------------------------------------------------------- what carries

    def _reach(self) -> float:
        """Returns the greatest rate that decode and colocated engines carry together within bounds and budget, beside
        the fewest engines that prefill.
        """
        limits = self.limits
        colocated = np.arange(limits.colocated_min, limits.colocated_max + 1)
        room = limits.budget - limits.prefill_min - colocated
        rates = self.table.decode[np.clip(room, 0, limits.decode_max)] + self.table.colocated[colocated]
        # a little less, so that rounding does not put these engines below it
        return float(rates[room >= 0].max()) * (1.0 - 1e-9)

    def needed(self, rate: float) -> tuple[IntArray, IntArray, IntArray]:
        """Returns (C, fewest P, fewest D) for every allowed number C of colocated engines, each an array.

        P and D are one above their table where no number carries the rate.
        """
        colocated = np.arange(self.limits.colocated_min, self.limits.colocated_max + 1)
        own = self.table.colocated[colocated]
        prefill = self.table.fewest(rate + self.backlog[0] - own, self.table.prefill)
        decode = self.table.fewest(min(rate + self.backlog[1], self.reach) - own, self.table.decode)
        return (
            colocated,
            np.maximum(prefill, self.limits.prefill_min),
            np.maximum(np.minimum(decode, self.enough), max(self.limits.decode_min, self.held)),
        )

    def carries(self, counts: Counts, rate: float) -> bool:
        """Returns whether these engines carry `rate` requests/s and the backlog, decode as far as its `reach`."""
        own = self.table.colocated[counts.colocated]
        streams = min(rate + self.backlog[1], self.reach)
        return bool(
            counts.decode >= self.held
            and self.table.prefill[counts.prefill] + own >= rate + self.backlog[0] - 1e-9
            and (counts.decode >= self.enough or self.table.decode[counts.decode] + own >= streams - 1e-9)
        )

    def fits(self, rate: float) -> npt.NDArray[np.bool_]:
        """Returns, for every allowed C, whether bounds and budget have the engines that carry the rate."""
        colocated, prefill, decode = self.needed(rate)
        fits: npt.NDArray[np.bool_] = (
            (prefill <= self.limits.prefill_max)
            & (decode <= self.limits.decode_max)
            & (prefill + decode + colocated <= self.limits.budget)
        )
        return fits

    def carried(self, rate: float) -> float:
        """Returns the rate, or the greatest one that bounds and budget carry if that is less."""
        if self.fits(rate).any():
            return rate
        low, high = 0.0, rate
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            low, high = (middle, high) if self.fits(middle).any() else (low, middle)
        return low

    def fewest(self, rate: float) -> int:
        """Returns the least number of engines that carry the rate, or of those that are allowed."""
        rate = self.carried(rate)
        colocated, prefill, decode = self.needed(rate)
        totals = (prefill + decode + colocated)[self.fits(rate)]
        return int(totals.min()) if totals.size else self.limits.least.total

    # ---------------------------------------------------------------------------------------------------- decisions

    def decide(self, new_window: bool) -> Step:
        """Returns the decision. After a `new_window` in which the engines were enough, their requests are judged."""
        policy, state, now_s = self.policy, self.state, self.seen.now_s
        reasons = [self._said()]
        if self.table.infeasible:
            objectives = " and ".join(self.table.infeasible)
            reasons.append(f"{objectives}: below what one idle engine needs; more engines do not help")
        target = self.wanted
        if not self.carries(self.wanted, self.up):
            target, why = self._grown()
            reasons.append(why)
            state = replace(state, calm_since_s=None, stood_since_s=None)
        else:
            if new_window and not self.table.infeasible:
                state = policy.judged(self.seen, state)
            fewer = self._fewer()
            if fewer.total >= self.wanted.total:
                state = replace(state, calm_since_s=None)
            else:
                since_s = now_s if state.calm_since_s is None else state.calm_since_s
                state = replace(state, calm_since_s=since_s)
                if now_s - since_s >= policy.calm_s and now_s - state.grown_s >= policy.cool_down_s:
                    target = fewer
                    reasons.append(
                        f"{self.down:.3g}/s need {_shown(fewer)} for {now_s - since_s:.0f} s: shrink"
                    )
        target = stepped(self.wanted, target, self.limits.step)
        warm, state = self._warm_held(self._warm(target), state)
        target, warm = self.limits.kept(target, warm)
        if target.total > self.wanted.total:
            state = replace(state, grown_s=now_s)
        gains, losses = (any(op(b, a) for a, b in zip(self.wanted, target, strict=True)) for op in (gt, lt))
        if gains and losses:
            state = replace(state, switched_s=now_s, grown_s=now_s)
        elif losses:
            state = replace(state, calm_since_s=now_s)
        if target != self.wanted:
            reasons.append(f"{_shown(self.wanted)} -> {_shown(target)}")
            state = replace(state, stood_since_s=None)
        return policy._planned(self.seen, replace(state, wanted=target, warm=warm), tuple(reasons))

    def _said(self) -> str:
        known = self.state
        return (
            f"{self.demand.prompt_tokens:.0f} + {self.demand.output_tokens:.0f} tokens;"
            f" level {known.forecast.level:.3g}/s,"
            f" with quantile {self.policy.quantile:g} and headroom {known.headroom:.2f}: {self.up:.3g}/s"
            f" (+ {self.backlog[0]:.3g} queued, {self.backlog[1]:.3g} pooled); {_shown(self.wanted)} carry"
            f" {self.table.prefill[self.wanted.prefill]:.3g} + {self.table.colocated[self.wanted.colocated]:.3g},"
            f" {self.table.decode[self.wanted.decode]:.3g} + {self.table.colocated[self.wanted.colocated]:.3g}"
        )

    def _grown(self) -> tuple[Counts, str]:
        """Returns the counts after the cheapest change that carries the demand, and the reason."""
        policy, wanted, limits = self.policy, self.wanted, self.limits
        rate = self.carried(self.up)
        colocated, prefill, decode = self.needed(rate)
        _, donor_prefill, donor_decode = self.needed(rate * (1.0 + policy.band))
        now = np.array(wanted).reshape(3, 1)
        lack = np.maximum(np.stack([prefill, decode, colocated]) - now, 0)
        over = np.maximum(now - np.stack([donor_prefill, donor_decode, colocated]), 0)
        if self.seen.now_s - self.state.switched_s < policy.switch_pause_s:
            over[:] = 0
        switches = np.minimum(lack.sum(axis=0), over.sum(axis=0))
        added = lack.sum(axis=0) - switches
        warm = len(self.seen.with_duty(Duty.WARM))
        activated = np.minimum(added, warm)
        # Without enough budget a role must give what it needs only for the band.
        short = wanted.total + added > limits.budget
        cost = (
            added
            + policy.switch_cost * switches
            + policy.activate_cost * activated
            + policy.start_cost * (added - activated)
            + np.where(self.fits(rate), 0.0, math.inf)
            + np.where(short, 1e3, 0.0)
            + 1e-6 * np.abs(colocated - wanted.colocated)
        )
        best = int(np.argmin(cost))
        if not math.isfinite(cost[best]) or short[best]:
            # Only the smallest fleet that carries the rate fits the budget: its roles are taken as they are. Where the
            # backlog alone is too much for any fleet, the most colocated engines are the nearest to it.
            fits = self.fits(rate)
            totals = np.where(fits, prefill + decode + colocated, np.iinfo(np.int64).max)
            best = int(np.argmin(totals)) if fits.any() else len(colocated) - 1
            counts = Counts(int(prefill[best]), int(decode[best]), int(colocated[best]))
            counts, _ = limits.kept(counts, 0)
            return counts, f"budget or bounds carry {rate:.3g}/s at most: {_shown(counts)}"
        changed, left = list(wanted), int(switches[best])
        for i in range(3):
            changed[i] += int(lack[i, best])
            given = min(left, int(over[i, best]))
            changed[i] -= given
            left -= given
        return Counts(*changed), (
            f"cheapest change for {rate:.3g}/s: {int(switches[best])} switch, {int(activated[best])} activate,"
            f" {int(added[best] - activated[best])} start"
        )

    def _fewer(self) -> Counts:
        """Returns the fewest of the wanted engines that carry the demand before any goes."""
        colocated, prefill, decode = self.needed(self.down)
        within = (
            (prefill <= self.wanted.prefill)
            & (decode <= self.wanted.decode)
            & (colocated <= self.wanted.colocated)
        )
        if not within.any():
            return self.wanted
        totals = np.where(within, prefill + decode + colocated, np.iinfo(np.int64).max)
        best = int(np.argmin(totals))
        return Counts(int(prefill[best]), int(decode[best]), int(colocated[best]))

    def _warm(self, target: Counts) -> int:
        return warm_pool.spare(target.total, self.fewest(self.later), self.limits)

    def _warm_held(self, warm: int, state: JointState) -> tuple[int, JointState]:
        """Returns the wanted warm engines: more at once, fewer only after `calm_s` of too many."""
        now_s = self.seen.now_s
        if warm >= state.warm:
            return warm, replace(state, idle_since_s=None)
        since_s = now_s if state.idle_since_s is None else state.idle_since_s
        if now_s - since_s < self.policy.calm_s:
            return state.warm, replace(state, idle_since_s=since_s)
        return warm, replace(state, idle_since_s=None)


def _shown(counts: Counts) -> str:
    return f"{counts.prefill}P {counts.decode}D {counts.colocated}C"
