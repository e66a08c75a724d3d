"""Admission by predicted wait: a request is taken if its first token is expected within its TTFT objective.

    expected_s = waited_s + queue_s + prefill_s + pool_s + transfer_s + first_step_s
    queue_s      = when a prefill worker is free, behind the prompts queued before it (`PrefillTier.start_s`)
                   * tokens_per_s / (tokens_per_s - urgent_tokens_per_s)
    prefill_s    = its prompt / the mean tokens_per_s of a prefill worker
    pool_s       = max(0, slot_s - queue_s - prefill_s)
    slot_s       = (e + z * sqrt(e)) / (departures_per_s - urgent_sequences_per_s)
    e            = sequences before it that hold no slot yet + its own - free slots                    (0 if negative)
    departures_per_s = slots / (output_tokens * token_s)
    refused where  waited_s + (1 + margin) * (the other terms) > budget_s
    at_best_s  = expected_s with z = 0, no urgent rates, and of what is before it only what is there already
    shed where     both sums are above budget_s; with `shed_by` "forecast" where the one with the margin is

All rates are measured (`rates`); output_tokens is the mean forecast of the sequences before it, or where there is no
predictor what ended sequences had. z is `deviations`: departures come at random, so that the wait for e of them has a
deviation of about sqrt(e) gaps. More urgent requests that come later overtake it; what they take of the service, by
what came of late, is no longer there for it (as in a queue with priorities, Cobham 1954). Where classes share
(`class_ratio` of the fairness policy) this rate counts as 0: what waits in another class, or is expected to come there
until the request is late, counts as before it, but no more than that class gets by its weight. On a colocated worker
the request waits for a slot first and computes its prompt there, so queue_s is slot_s, and there is no pool and
transfer. A term of which nothing was measured yet counts as 0: what it takes shows when the request has its turn.

A request is judged again when it has its turn, at each tick while it is queued, and while it waits in the pool: what
cannot make its objective any more is shed, before more is spent on it. `shed_by` says by which sum. The forecast moves
from tick to tick, above all with the urgent rates. Its margins make up for that at the arrival, where a request is
judged once; judged again and again by the same sum, it is shed in the first bad moment of many, although it costs no
engine anything while it is queued. With "optimistic" it is shed only where the sum at best misses the objective, too.
In between it is in doubt: it keeps its turn, and is held or sent as others are. It goes before the newest of its
tenant, since LIFO begins with what is shed. If its prompt is computed and it misses after all, the time of the prefill
worker is lost for everybody, and where tenants have counters the prompt stays charged to its own. The sum at best takes
the mean rate of departures, so a request that is shed by it might have been lucky.

A request that would wait in the pool for longer than `hold_s` with its prompt computed is held in the queue, so that
the pressure of decode reaches the queue before a prefill is spent. So is one that would wait for longer than `ahead_s`
inside its prefill engine, where nothing more urgent could overtake it. Both go by the forecast. A request of several
choices is held for those with which it may begin (`base.Case`), and never for more than the tier has: nobody passes
what is held, and the slots for its other choices would stay idle meanwhile.

What is never shed as late might be held without end: a request without a TTFT objective, or a committed one
(`base.Case`). It is held until it has waited for `hold_at_most_s`, and then goes on, to wait in the engine or in the
pool as with `open`. It is not held either while the wait for a slot is not known. The dispatcher ends every hold before
`queue_timeout_s` would reject the request.

A TPOT objective is compared with the time for each token that decode workers need with the sequences that they are to
get before it:

    (1 + tpot_margin) * (token_s + token_per_sequence_s * sequences more on each worker) <= tpot_slo_s

That sum is the forecast's at every moment: a request whose tokens would be too slow makes those of others slower.

Requests without objectives and committed ones are never refused. While no request has an objective the policy is not
asked (`policies.dispatch.gate`). Adaptive LIFO, by which the newest goes first while the oldest is late, is the
dispatcher's part (after Facebook's, in Maurer, "Fail at Scale", ACM Queue 13(8), 2015).
Not claimed: fairness between tenants, which is `policies.fairness`; waits are expected by its shares.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, NamedTuple

from policies.admission.base import (
    ADMITTED,
    Case,
    DecodeTier,
    Judgement,
    Moment,
    Outlook,
    PrefillTier,
    Verdict,
)
from policies.request.terms import Mode
from policies.routing.base import Needs
from policies.routing.params import Number, OneOf, check
from policies.state.standing import PROMPT_TOKENS
from policies.state.waiting import Backlog

LEAST_SHARE = 0.1
"""Least share of the service that is expected to be left for a request however much comes that is more urgent."""

FORECAST, OPTIMISTIC = "forecast", "optimistic"
EXPECTED, AT_BEST = "the first token is expected after", "the first token comes at best after"

Terms = dict[str, float]


class _Way(NamedTuple):
    """One way to the first token: its terms, the time of a token there (None: not measured), whether there is a wait
    for a slot that is not known, for how long the least loaded prefill worker has work, and for how long the computed
    prompt would wait until the request may begin.
    """

    terms: Terms
    token_s: float | None
    slot_unknown: bool = False
    ahead_s: float = 0.0
    begins_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ByWait:
    """Takes a request if its first token is expected within its TTFT objective and its later tokens within its TPOT
    objective; what has become late meanwhile is shed.
    """

    # ASSUMPTION: all of these, to be measured by the experiment `overload`
    margin: Annotated[float, Number(low=0.0, high=10.0)] = 0.2
    """Share by which the expected times to the first token are taken to be too short."""
    tpot_margin: Annotated[float, Number(low=0.0, high=10.0)] = 0.03
    """Share by which the expected time of a token is taken to be too short."""
    deviations: Annotated[float, Number(low=0.0, high=10.0)] = 1.5
    """z, the deviations of the wait for a slot that are added to its mean."""
    hold_s: Annotated[float, Number(low=0.0, unit="s", endless=True)] = 2.0
    """Longest expected wait in the pool for which a prompt is computed now; infinity holds nothing."""
    ahead_s: Annotated[float, Number(above=0.0, unit="s", endless=True)] = 0.3
    """Longest work of the least loaded prefill worker for which a further prompt is sent to one; infinity holds
    nothing.
    """
    # ASSUMPTION: longer than decode is full for a moment, and far below `queue_timeout_s`, after which it is rejected
    hold_at_most_s: Annotated[float, Number(low=0.0, unit="s", endless=True)] = 10.0
    """Longest wait of a request without a TTFT objective, or of a committed one, with which it is still held; infinity
    sets no bound.
    """
    shed_by: Annotated[str, OneOf((FORECAST, OPTIMISTIC))] = FORECAST
    """Sum by which a request that was taken is shed as late: `forecast` is the one with all margins, by which it was
    taken; `optimistic` is the sum at best, without `margin`, `deviations`, and more urgent requests yet to come.
    """
    name: str = "by_wait"
    paper: ClassVar[str] = (
        "ours; queues with priorities after Cobham 1954, LIFO under overload after Maurer 2015"
    )
    formula: ClassVar[str] = (
        "waited_s + queue_s + prefill_s + pool_s + transfer_s + first_step_s <= budget_s, and token_s <= tpot_slo_s"
    )
    needs: ClassVar[Needs] = Needs.LENGTHS
    watches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self)

    def judge(self, case: Case, outlook: Outlook) -> Judgement:
        if outlook.sleeps:
            return ADMITTED
        slo_s = case.request.terms.ttft_slo_s
        if slo_s is None and case.request.terms.tpot_slo_s is None and case.moment is not Moment.TURN:
            return ADMITTED
        found = self._expected(case, outlook, self.deviations)
        if found is None:
            return ADMITTED
        terms = {"waited_s": max(0.0, case.now_s - case.counts_from_s), **found.terms}
        judged = Judgement(Verdict.ADMIT, "", slo_s, terms, terms["queue_s"] + terms["pool_s"])
        if not case.committed:
            judged = self._by_tokens(case, found, judged) or self._by_first_token(case, outlook, judged)
        if case.moment is Moment.TURN and judged.verdict is Verdict.ADMIT:
            busy = self._busy(case, found, terms)
            if busy:
                return Judgement(Verdict.HOLD, busy, slo_s, terms, judged.wait_s)
        return ADMITTED if slo_s is None and judged.verdict is Verdict.ADMIT else judged

    def _by_tokens(self, case: Case, found: _Way, forecast: Judgement) -> Judgement | None:
        """Returns the refusal of a request whose tokens would take longer than its objective allows; None if they do
        not, or if its prompt is computed already.
        """
        tpot_s, token_s = case.request.terms.tpot_slo_s, found.token_s
        if tpot_s is None or token_s is None or case.moment is Moment.POOLED:
            return None
        if (1.0 + self.tpot_margin) * token_s <= tpot_s:
            return None
        allowed = f"and the request allows {1e3 * tpot_s:.0f} ms"
        said = f"a token is expected to take {1e3 * token_s:.0f} ms, {allowed}"
        return Judgement(
            Verdict.REFUSE, "tpot_objective", tpot_s, {"token_s": token_s}, forecast.wait_s, said
        )

    def _by_first_token(self, case: Case, outlook: Outlook, forecast: Judgement) -> Judgement:
        """Returns the refusal of a request whose first token would come too late, else the forecast, with a sentence in
        it if the request is in doubt.
        """
        slo_s, terms, wait_s = case.request.terms.ttft_slo_s, forecast.terms, forecast.wait_s
        if slo_s is None:
            return forecast
        waited_s = terms["waited_s"]
        if waited_s + (1.0 + self.margin) * (forecast.expected_s - waited_s) <= slo_s:
            return forecast
        if case.moment is Moment.ARRIVAL or self.shed_by == FORECAST:
            reason = "ttft_objective" if case.moment is Moment.ARRIVAL else "late"
            return Judgement(Verdict.REFUSE, reason, slo_s, terms, wait_s, in_words(terms, slo_s))
        best = self._at_best(case, outlook, forecast)
        best_s = sum(best.values())
        if best_s > slo_s:
            # another try is judged by the forecast, and so is its wait
            return Judgement(Verdict.REFUSE, "late", slo_s, best, wait_s, in_words(best, slo_s, AT_BEST))
        doubt = f"in doubt: {in_words(terms, slo_s)}; at best it comes after {best_s:.1f} s"
        return Judgement(Verdict.ADMIT, "", slo_s, terms, wait_s, doubt)

    def _busy(self, case: Case, found: _Way, terms: Terms) -> str:
        """Returns why a request is held at its turn, "" if it is not."""
        sheds = case.request.terms.ttft_slo_s is not None and not case.committed
        if not sheds and terms["waited_s"] > self.hold_at_most_s:
            return ""
        blind = sheds and found.slot_unknown and math.isfinite(self.hold_s)
        if blind or found.begins_s > self.hold_s:
            return "decode_full"
        return "prefill_full" if found.ahead_s > self.ahead_s else ""

    # ------------------------------------------------------------------------------------------------ expectations

    def _at_best(self, case: Case, outlook: Outlook, forecast: Judgement) -> Mapping[str, float]:
        """Returns the terms of the shorter way if nothing more urgent comes and sequences end at their mean rate."""
        if case.without_slot_now is not None:
            case = replace(case, without_slot=case.without_slot_now)
        calm = replace(outlook, urgent_tokens_per_s=0.0, urgent_sequences_per_s=0.0)
        way = self._expected(case, calm, 0.0)
        return forecast.terms if way is None else {"waited_s": forecast.terms["waited_s"], **way.terms}

    def _expected(self, case: Case, outlook: Outlook, deviations: float) -> _Way | None:
        """Returns the way that is expected to be the shorter one; None where no worker takes such requests. The wait
        for a slot is this many deviations above its mean.
        """
        terms = case.request.terms
        split, whole, decode = outlook.prefill, outlook.colocated, outlook.decode
        if terms.local or terms.mode is Mode.COLOCATED:
            split = None
        elif terms.mode is Mode.DISAGGREGATED:
            whole = None
        if case.moment is Moment.POOLED:
            whole = None
        share = 1.0
        if split is not None and decode is not None and whole is not None:
            # what is queued goes both ways
            share = decode.slots / (decode.slots + whole.slots)
        ways: list[_Way] = []
        if split is not None and decode is not None:
            ways.append(self._split(case, split, decode, outlook, share, deviations))
        if whole is not None:
            part = 1.0 if split is None or decode is None else 1.0 - share
            ways.append(self._whole(case, whole, outlook, part, deviations))
        return min(ways, key=lambda way: sum(way.terms.values()), default=None)

    def _split(
        self,
        case: Case,
        prefill: PrefillTier,
        decode: DecodeTier,
        outlook: Outlook,
        share: float,
        deviations: float,
    ) -> _Way:
        """Returns the way of a request whose prompt is computed on another worker than decodes it."""
        prompt = case.request.prompt_tokens + PROMPT_TOKENS
        queued = case.queued.prompt_tokens + PROMPT_TOKENS * case.queued.prompts
        queue_s = prefill_s = 0.0
        if case.moment is not Moment.POOLED:
            speed = prefill.tokens_per_s
            left = 1.0
            if case.moment is Moment.ARRIVAL and math.isfinite(speed):
                # at its turn it would be in an engine next, where nothing overtakes it
                left = _left(speed, outlook.urgent_tokens_per_s) / speed
            queue_s = prefill.start_s(share * queued) / left
            prefill_s = prompt * len(prefill.workers) / speed
        before = share * case.queued.sequences + case.without_slot.sequences
        slots = case.request.slots
        slot_s = self._slot_s(before, case, decode, outlook, deviations, slots)
        pool_s = begins_s = max(0.0, (slot_s or 0.0) - queue_s - prefill_s)
        begins_with = min(slots, slots if case.begins_with is None else case.begins_with, decode.slots)
        if begins_with < slots:
            slot_s = self._slot_s(before, case, decode, outlook, deviations, begins_with)
            begins_s = max(0.0, (slot_s or 0.0) - queue_s - prefill_s)
        terms = {
            "queue_s": queue_s,
            "prefill_s": prefill_s,
            "pool_s": pool_s,
            "transfer_s": decode.start_s or 0.0,
            "first_step_s": decode.first_step_s or 0.0,
        }
        token_s = _token_s(before, case, decode)
        return _Way(terms, token_s, slot_s is None, prefill.workers[0].busy_s, begins_s)

    def _whole(self, case: Case, tier: DecodeTier, outlook: Outlook, share: float, deviations: float) -> _Way:
        """Returns the way of a request whose prompt is computed where it is decoded."""
        before = share * case.queued.sequences
        slot_s = self._slot_s(before, case, tier, outlook, deviations, case.request.slots)
        prompt = case.request.prompt_tokens + PROMPT_TOKENS
        terms = {
            "queue_s": slot_s or 0.0,
            "prefill_s": (tier.prompt_token_s or 0.0) * prompt,
            "pool_s": 0.0,
            "transfer_s": 0.0,
            "first_step_s": 0.0,
        }
        return _Way(terms, _token_s(before, case, tier))

    def _slot_s(
        self, before: float, case: Case, tier: DecodeTier, outlook: Outlook, deviations: float, slots: int
    ) -> float | None:
        """Returns the expected time until this many slots are free for the request; None where fewer are free and
        nothing was measured.
        """
        excess = before + slots - max(0, tier.slots - tier.used)
        if case.moment is Moment.POOLED:
            # its turn comes with the next slot that frees
            excess = 0.0
        if excess <= 0:
            return 0.0
        tokens = _mean_output(case.queued, case.without_slot) or tier.output_tokens
        # the first sequences to end may have had no token, because their clients had left
        if tier.token_s is None or not tokens:
            return None
        departures_per_s = _left(tier.slots / (tokens * tier.token_s), outlook.urgent_sequences_per_s)
        return (excess + deviations * math.sqrt(excess)) / departures_per_s


def _left(per_s: float, urgent_per_s: float) -> float:
    """Returns the part of a service rate that more urgent work leaves."""
    return max(LEAST_SHARE * per_s, per_s - urgent_per_s)


def _mean_output(*backlogs: Backlog) -> float | None:
    """Returns the mean forecast output of the sequences that wait; None where none of them has a forecast."""
    foreseen = sum(backlog.foreseen for backlog in backlogs)
    return sum(backlog.output_tokens for backlog in backlogs) / foreseen if foreseen else None


def _token_s(before: float, case: Case, tier: DecodeTier) -> float | None:
    """Returns the expected time of a token where the workers have the sequences that come before the request, too."""
    if tier.token_s is None:
        return None
    more = min(before + case.request.slots, max(0, tier.slots - tier.used))
    return tier.token_s + tier.token_per_sequence_s * more / tier.workers


def in_words(terms: Mapping[str, float], budget_s: float, said: str = EXPECTED) -> str:
    """Returns the sum of the terms of a time as a sentence that begins with what is `said` of it."""
    parts = " + ".join(
        f"{name.removesuffix('_s').replace('_', ' ')} {value:.2f}"
        for name, value in terms.items()
        if value >= 0.005
    )
    return f"{said} {sum(terms.values()):.1f} s ({parts}), and the request allows {budget_s:g} s"
