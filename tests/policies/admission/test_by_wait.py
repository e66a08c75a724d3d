"""Admission by predicted wait on cases and outlooks worked by hand."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission.base import (
    ADMITTED,
    Backlog,
    Case,
    DecodeTier,
    Moment,
    Outlook,
    Prefiller,
    PrefillTier,
    Verdict,
)
from policies.admission.by_wait import ByWait
from policies.request.terms import Mode, Terms
from policies.routing.params import BadParameter
from policies.state.standing import PROMPT_TOKENS
from policies.state.views import Request

# without margins, so that sums can be compared
PLAIN = ByWait(margin=0.0, deviations=0.0, tpot_margin=0.0)
# with all margins, and both sums by which a request may be shed
FORECASTER = ByWait(margin=0.2, deviations=1.5, tpot_margin=0.0, shed_by="forecast")
OPTIMIST = dataclasses.replace(FORECASTER, shed_by="optimistic")
# 1,000 tokens a second each; the first is idle, the second has work for 3 s
PREFILL = PrefillTier((Prefiller(0.0, 1000.0), Prefiller(3.0, 1000.0)))
# 20 sequences end in a second: 10 slots / (50 tokens * 0.01 s)
DECODE = DecodeTier(2, 10, 6, 0.01, 0.0, 50.0, start_s=0.25, first_step_s=0.01)
FLEET = Outlook(PREFILL, DECODE)


def case(
    moment: Moment = Moment.ARRIVAL,
    prompt: int = 1000 - PROMPT_TOKENS,
    slo_s: float | None = 5.0,
    tpot_s: float | None = None,
    queued: Backlog = Backlog(),  # noqa: B008  # a record
    without_slot: Backlog = Backlog(),  # noqa: B008
    committed: bool = False,
    waited_s: float = 0.0,
    slots: int = 1,
    mode: Mode | None = None,
    without_slot_now: Backlog | None = None,
) -> Case:
    terms = Terms(ttft_slo_s=slo_s, tpot_slo_s=tpot_s, mode=mode)
    request = Request("r", 100.0, prompt, 10, slots, terms)
    now_s = 100.0 + waited_s
    return Case(request, moment, now_s, 100.0, queued, without_slot, committed, without_slot_now)


def waiting(prompts: int, tokens_each: int = 1000 - PROMPT_TOKENS, **more: float) -> Backlog:
    return dataclasses.replace(Backlog(prompts, prompts * tokens_each, prompts), **more)  # type: ignore[arg-type]


def test_an_empty_fleet_takes_the_request_and_says_what_it_expects() -> None:
    judged = PLAIN.judge(case(), FLEET)
    assert judged.verdict is Verdict.ADMIT and judged.budget_s == 5.0
    # a worker is idle; 1,000 tokens at 1,000/s; 4 of 10 slots are free
    assert judged.terms == {
        "waited_s": 0.0, "queue_s": 0.0, "prefill_s": 1.0, "pool_s": 0.0, "transfer_s": 0.25, "first_step_s": 0.01,
    }  # fmt: skip
    assert judged.expected_s == 1.26 and judged.wait_s == 0.0


def test_prompts_before_it_go_to_the_worker_that_is_free_first() -> None:
    # two prompts take the idle worker until 2 s; the other one is free at 3 s
    assert PLAIN.judge(case(queued=waiting(2)), FLEET).terms["queue_s"] == 2.0
    # seven: the idle one does 3 s alone, then both share the other 4 s of work: free at 5 s
    assert PLAIN.judge(case(queued=waiting(7), slo_s=99.0), FLEET).terms["queue_s"] == 5.0


def test_work_that_is_more_urgent_takes_its_share() -> None:
    # 1,500 of 2,000 tokens a second go to others: 2 s of waiting become 8 s
    busy = dataclasses.replace(FLEET, urgent_tokens_per_s=1500.0)
    judged = PLAIN.judge(case(queued=waiting(2)), busy)
    assert judged.verdict is Verdict.REFUSE and judged.terms["queue_s"] == 8.0
    # however much comes, a tenth is left
    flooded = dataclasses.replace(FLEET, urgent_tokens_per_s=1e9)
    assert PLAIN.judge(case(queued=waiting(2)), flooded).terms["queue_s"] == pytest.approx(20.0)


def test_the_wait_for_a_slot_begins_now_and_ends_in_the_pool() -> None:
    # 63 sequences come before it, 4 slots are free: 60 must end first, which takes 3 s, of which 1 s is prefill
    pooled = Backlog(63, 63, 63)
    judged = PLAIN.judge(case(without_slot=pooled), FLEET)
    assert judged.terms["pool_s"] == 2.0 and judged.wait_s == 2.0 and judged.verdict is Verdict.ADMIT
    # one deviation of a Poisson wait more: (60 + sqrt(60)) / 20 - 1 s
    careful = ByWait(margin=0.0, deviations=1.0)
    assert careful.judge(case(without_slot=pooled), FLEET).terms["pool_s"] == pytest.approx(
        3.0 + math.sqrt(60.0) / 20.0 - 1.0
    )
    # forecasts say that those which wait are twice as long
    long = dataclasses.replace(pooled, foreseen=63, output_tokens=63 * 100.0)
    judged = PLAIN.judge(case(without_slot=long), FLEET)
    assert judged.terms["pool_s"] == 5.0 and judged.verdict is Verdict.REFUSE


def test_a_request_of_many_choices_needs_many_slots() -> None:
    # 24 slots, 4 are free: 20 sequences must end
    assert PLAIN.judge(case(slots=24, prompt=0), FLEET).terms["pool_s"] == pytest.approx(
        1.0 - PROMPT_TOKENS / 1000.0
    )


def test_what_cannot_make_it_is_refused_with_the_wait_and_in_words() -> None:
    judged = PLAIN.judge(case(without_slot=Backlog(143, 0, 143), waited_s=0.5), FLEET)
    # (143 + 1 - 4) / 20 = 7 s until a slot is free
    assert (judged.verdict, judged.reason) == (Verdict.REFUSE, "ttft_objective")
    assert judged.wait_s == 6.0 and judged.budget_s == 5.0
    assert judged.detail == (
        "the first token is expected after 7.8 s (waited 0.50 + prefill 1.00 + pool 6.00 + transfer 0.25"
        " + first step 0.01), and the request allows 5 s"
    )


@pytest.mark.parametrize(("slo_s", "verdict"), [(1.37, Verdict.REFUSE), (1.39, Verdict.ADMIT)])
def test_the_margin_is_of_what_is_expected_not_of_what_has_passed(slo_s: float, verdict: Verdict) -> None:
    # 0 + 1.1 * 1.26 = 1.386
    assert ByWait(margin=0.1, deviations=0.0).judge(case(slo_s=slo_s), FLEET).verdict is verdict
    assert (
        ByWait(margin=0.1, deviations=0.0).judge(case(slo_s=slo_s + 9, waited_s=9.0), FLEET).verdict
        is verdict
    )


@pytest.mark.parametrize("policy", [PLAIN, OPTIMIST], ids=lambda policy: policy.shed_by)
def test_requests_without_objectives_and_committed_ones_are_never_refused(policy: ByWait) -> None:
    crowd = Backlog(10**6, 10**9, 10**6)
    for moment in Moment:
        free = policy.judge(case(moment, slo_s=None, queued=crowd, without_slot=crowd, waited_s=1e6), FLEET)
        again = policy.judge(
            case(moment, tpot_s=1e-6, queued=crowd, without_slot=crowd, committed=True, waited_s=1e6), FLEET
        )
        assert Verdict.REFUSE not in (free.verdict, again.verdict)


def test_nothing_is_refused_while_the_fleet_sleeps_or_before_anything_was_measured() -> None:
    assert PLAIN.judge(case(slo_s=1e-9), Outlook(sleeps=True)) is ADMITTED
    unknown = Outlook(PrefillTier((Prefiller(0.0, math.inf),)), DecodeTier(1, 4, 0))
    assert PLAIN.judge(case(slo_s=1e-9, queued=waiting(50)), unknown).verdict is Verdict.ADMIT
    assert PLAIN.judge(case(slo_s=1e-9), Outlook()) is ADMITTED


def test_a_turn_is_held_while_the_prompt_would_wait_computed() -> None:
    pooled = Backlog(64, 64, 64)
    # 61 departures take 3.05 s, of which 1 s is prefill
    held = PLAIN.judge(case(Moment.TURN, without_slot=pooled), FLEET)
    assert (held.verdict, held.reason) == (Verdict.HOLD, "decode_full")
    assert PLAIN.judge(case(Moment.ARRIVAL, without_slot=pooled), FLEET).verdict is Verdict.ADMIT
    free = PLAIN.judge(case(Moment.TURN, without_slot=pooled, slo_s=None), FLEET)
    assert free.verdict is Verdict.HOLD
    patient = ByWait(margin=0.0, deviations=0.0, hold_s=math.inf)
    assert patient.judge(case(Moment.TURN, without_slot=pooled), FLEET).verdict is Verdict.ADMIT


def test_a_turn_is_held_without_a_free_slot_as_long_as_nothing_was_measured() -> None:
    full = Outlook(PREFILL, DecodeTier(1, 4, 4))
    assert PLAIN.judge(case(Moment.TURN), full).verdict is Verdict.HOLD
    assert PLAIN.judge(case(Moment.ARRIVAL), full).verdict is Verdict.ADMIT


def test_a_turn_is_held_while_every_prefill_worker_has_work_enough() -> None:
    busy = Outlook(PrefillTier((Prefiller(0.5, 1000.0), Prefiller(3.0, 1000.0))), DECODE)
    held = PLAIN.judge(case(Moment.TURN), busy)
    assert (held.verdict, held.reason) == (Verdict.HOLD, "prefill_full")
    assert dataclasses.replace(PLAIN, ahead_s=0.5).judge(case(Moment.TURN), busy).verdict is Verdict.ADMIT


# requests that are never shed as late
UNSHED = pytest.mark.parametrize(
    "asked",
    [{"slo_s": None}, {"slo_s": None, "tpot_s": 1.0}, {"committed": True}],
    ids=["no objective", "tpot only", "committed"],
)


@UNSHED
@pytest.mark.parametrize("why", ["decode_full", "prefill_full"])
def test_what_is_never_shed_as_late_is_held_for_a_bounded_time(asked: dict[str, Any], why: str) -> None:
    # as above: its computed prompt would wait for 2.05 s, or there is work for 0.5 s before it
    before = Backlog(64, 64, 64) if why == "decode_full" else Backlog()
    busy = Outlook(PrefillTier((Prefiller(0.5, 1000.0), Prefiller(3.0, 1000.0))), DECODE)
    fleet = FLEET if why == "decode_full" else busy
    held = PLAIN.judge(case(Moment.TURN, without_slot=before, waited_s=9.9, **asked), fleet)
    assert (held.verdict, held.reason) == (Verdict.HOLD, why)
    longer = case(Moment.TURN, without_slot=before, waited_s=10.1, **asked)
    assert PLAIN.judge(longer, fleet).verdict is Verdict.ADMIT
    assert dataclasses.replace(PLAIN, hold_at_most_s=math.inf).judge(longer, fleet).verdict is Verdict.HOLD
    # one that may be shed is held until it is late
    hurried = case(Moment.TURN, slo_s=1000.0, without_slot=before, waited_s=10.1)
    assert PLAIN.judge(hurried, fleet).verdict is Verdict.HOLD


@UNSHED
def test_what_is_never_shed_as_late_is_not_held_for_an_unknown_time(asked: dict[str, Any]) -> None:
    full = Outlook(PREFILL, DecodeTier(1, 4, 4))
    assert PLAIN.judge(case(Moment.TURN, **asked), full).verdict is Verdict.ADMIT


def test_what_is_late_is_shed_at_its_turn_and_in_the_pool() -> None:
    turn = PLAIN.judge(case(Moment.TURN, waited_s=3.75), FLEET)
    assert (turn.verdict, turn.reason) == (Verdict.REFUSE, "late")  # 3.75 + 1.26 > 5
    # computed already: 4.75 + 0.26 > 5, and no slot is counted, since the next one is its
    full = Outlook(PREFILL, dataclasses.replace(DECODE, used=10))
    assert PLAIN.judge(case(Moment.POOLED, waited_s=4.73), full).verdict is Verdict.ADMIT
    assert PLAIN.judge(case(Moment.POOLED, waited_s=4.75), full).verdict is Verdict.REFUSE


# ------------------------------------------------------------------------------------------------------- shed_by

# 60 sequences must end before a slot is free: 60 / 20 = 3 s on average, and with 1.5 deviations
# (60 + 1.5 * sqrt(60)) / 20 = 3.581 s; of both the prompt takes 1 s. The first token comes 0.26 s later. So the sums
# without the time waited are 3.26 s at best and 3.841 s by the forecast, or 4.609 s with its margin.
BEHIND_60 = Backlog(63, 63, 63)


@pytest.mark.parametrize(
    ("waited_s", "forecast", "optimistic"),
    [
        (0.39, Verdict.HOLD, Verdict.HOLD),  # 0.39 + 4.609 < 5
        (0.40, Verdict.REFUSE, Verdict.HOLD),  # 0.40 + 4.609 > 5
        (1.73, Verdict.REFUSE, Verdict.HOLD),  # 1.73 + 3.26 < 5
        (1.75, Verdict.REFUSE, Verdict.REFUSE),  # 1.75 + 3.26 > 5
    ],
)
def test_between_both_sums_a_queued_request_is_in_doubt_and_not_shed(
    waited_s: float, forecast: Verdict, optimistic: Verdict
) -> None:
    # the wait in the pool, 2.581 s by the forecast, is above `hold_s`
    queued = case(Moment.TURN, without_slot=BEHIND_60, waited_s=waited_s)
    assert FORECASTER.judge(queued, FLEET).verdict is forecast
    assert OPTIMIST.judge(queued, FLEET).verdict is optimistic


def test_one_in_doubt_goes_forward_where_nothing_holds_it_and_the_judgement_says_so() -> None:
    patient = dataclasses.replace(OPTIMIST, hold_s=math.inf)
    judged = patient.judge(case(Moment.TURN, without_slot=BEHIND_60, waited_s=1.5), FLEET)
    assert (judged.verdict, judged.reason) == (Verdict.ADMIT, "")
    # the terms are those of the forecast, as with every request that is admitted
    assert judged.terms["pool_s"] == pytest.approx(2.581, abs=1e-3)
    assert judged.detail == (
        "in doubt: the first token is expected after 5.3 s (waited 1.50 + prefill 1.00 + pool 2.58 + transfer 0.25"
        " + first step 0.01), and the request allows 5 s; at best it comes after 4.8 s"
    )
    sure = patient.judge(case(Moment.TURN, without_slot=BEHIND_60, waited_s=0.3), FLEET)
    assert sure.verdict is Verdict.ADMIT and not sure.detail


def test_what_is_shed_at_best_shows_that_sum_and_the_wait_of_another_try() -> None:
    judged = OPTIMIST.judge(case(Moment.TURN, without_slot=BEHIND_60, waited_s=1.75), FLEET)
    assert (judged.verdict, judged.reason, judged.budget_s) == (Verdict.REFUSE, "late", 5.0)
    assert judged.terms == {
        "waited_s": 1.75, "queue_s": 0.0, "prefill_s": 1.0, "pool_s": 2.0, "transfer_s": 0.25, "first_step_s": 0.01,
    }  # fmt: skip
    # another try is judged by the forecast at its arrival
    assert judged.wait_s == pytest.approx(2.581, abs=1e-3)
    assert judged.detail == (
        "the first token comes at best after 5.0 s (waited 1.75 + prefill 1.00 + pool 2.00 + transfer 0.25"
        " + first step 0.01), and the request allows 5 s"
    )


def test_more_urgent_requests_that_may_come_do_not_shed_a_queued_one_at_best() -> None:
    # 15 of 20 departures a second go to others: 60 take 12 s by the mean, and 3 s without them
    busy = dataclasses.replace(FLEET, urgent_sequences_per_s=15.0)
    queued = case(Moment.TURN, without_slot=BEHIND_60)
    assert PLAIN.judge(queued, busy).verdict is Verdict.REFUSE
    assert dataclasses.replace(PLAIN, shed_by="optimistic").judge(queued, busy).verdict is Verdict.HOLD


def test_where_classes_share_only_those_that_are_there_count_at_best() -> None:
    # 80 more are expected to come before it: (143 + 1 - 4) / 20 = 7 s, and 3 s without them
    queued = case(Moment.TURN, without_slot=Backlog(143, 143, 143), without_slot_now=BEHIND_60)
    assert PLAIN.judge(queued, FLEET).verdict is Verdict.REFUSE
    judged = dataclasses.replace(PLAIN, shed_by="optimistic").judge(queued, FLEET)
    # it is held by the forecast
    assert (judged.verdict, judged.reason) == (Verdict.HOLD, "decode_full")
    assert judged.terms["pool_s"] == 6.0


def test_a_colocated_worker_is_waited_for_at_best_as_well() -> None:
    # 60 of 10 a second take 6 s, or 7.16 s with 1.5 deviations, then 1,000 tokens at 1 ms: 7 s and 8.16 s
    fleet = Outlook(colocated=DecodeTier(1, 10, 6, 0.02, 0.0, 50.0, prompt_token_s=0.001))
    queued = case(Moment.TURN, slots=64, slo_s=8.0)
    assert dataclasses.replace(FORECASTER, margin=0.0).judge(queued, fleet).verdict is Verdict.REFUSE
    assert OPTIMIST.judge(queued, fleet).verdict is Verdict.ADMIT
    late = dataclasses.replace(queued, now_s=101.1)
    assert OPTIMIST.judge(late, fleet).terms["queue_s"] == 6.0


def test_a_computed_prompt_is_shed_at_best_without_the_margin() -> None:
    # 4.7 + 1.2 * 0.26 = 5.012 s, and without the margin 4.96 s
    full = Outlook(PREFILL, dataclasses.replace(DECODE, used=10))
    assert FORECASTER.judge(case(Moment.POOLED, waited_s=4.7), full).verdict is Verdict.REFUSE
    assert OPTIMIST.judge(case(Moment.POOLED, waited_s=4.7), full).verdict is Verdict.ADMIT
    assert OPTIMIST.judge(case(Moment.POOLED, waited_s=4.75), full).verdict is Verdict.REFUSE


@pytest.mark.parametrize("waited_s", [0.0, 0.39, 0.40, 9.0])
def test_at_the_arrival_both_are_one_policy(waited_s: float) -> None:
    came = case(without_slot=BEHIND_60, waited_s=waited_s)
    assert OPTIMIST.judge(came, FLEET) == FORECASTER.judge(came, FLEET)


def test_what_is_too_slow_for_its_tpot_objective_is_shed_by_the_forecast_alone() -> None:
    slow = case(Moment.TURN, tpot_s=0.0121, without_slot=Backlog(3, 3, 3))
    tier = dataclasses.replace(DECODE, token_per_sequence_s=0.001)
    careful = dataclasses.replace(OPTIMIST, tpot_margin=0.1)
    judged = careful.judge(slow, Outlook(PREFILL, tier))
    assert (judged.verdict, judged.reason) == (Verdict.REFUSE, "tpot_objective")


@settings(max_examples=200, deadline=None)
@given(
    moment=st.sampled_from([Moment.TURN, Moment.POOLED]),
    now=st.integers(0, 200),
    coming=st.integers(0, 200),
    waited_s=st.floats(0.0, 6.0),
    urgent=st.floats(0.0, 30.0),
    used=st.integers(0, 10),
    margin=st.floats(0.0, 1.0),
    deviations=st.floats(0.0, 3.0),
)
def test_nothing_is_shed_at_best_that_the_forecast_keeps(
    moment: Moment,
    now: int,
    coming: int,
    waited_s: float,
    urgent: float,
    used: int,
    margin: float,
    deviations: float,
) -> None:
    fleet = Outlook(PREFILL, dataclasses.replace(DECODE, used=used), urgent_sequences_per_s=urgent)
    there, all_of_them = Backlog(now, now, now), Backlog(now + coming, now + coming, now + coming)
    one = case(moment, without_slot=all_of_them, waited_s=waited_s, without_slot_now=there)
    by = {
        shed_by: ByWait(margin=margin, deviations=deviations, shed_by=shed_by).judge(one, fleet)
        for shed_by in ("forecast", "optimistic")
    }
    if by["forecast"].verdict is not Verdict.REFUSE:
        assert by["optimistic"] == by["forecast"]
    elif by["optimistic"].verdict is Verdict.REFUSE:
        assert by["optimistic"].expected_s > 5.0 and by["optimistic"].wait_s == by["forecast"].wait_s
    elif moment is Moment.TURN:
        assert by["optimistic"].terms == by["forecast"].terms


# ------------------------------------------------------------------------------------------------- other objectives


def test_a_tpot_objective_is_compared_with_the_batch_that_it_will_meet() -> None:
    # 6 of 10 run on 2 workers at 10 ms; 3 more come before it and 1 is its own: 2 more each, at 1 ms each
    tier = dataclasses.replace(DECODE, token_per_sequence_s=0.001)
    fleet = Outlook(PREFILL, tier)
    ahead = Backlog(3, 3, 3)
    fits = PLAIN.judge(case(slo_s=None, tpot_s=0.0121, without_slot=ahead), fleet)
    slow = PLAIN.judge(case(slo_s=None, tpot_s=0.0119, without_slot=ahead), fleet)
    assert fits.verdict is Verdict.ADMIT
    assert (slow.verdict, slow.reason, slow.budget_s) == (Verdict.REFUSE, "tpot_objective", 0.0119)
    assert slow.terms == {"token_s": pytest.approx(0.012)}
    assert slow.detail == "a token is expected to take 12 ms, and the request allows 12 ms"
    # no more than the slots count: the others wait
    crowd = PLAIN.judge(case(slo_s=None, tpot_s=0.0121, without_slot=Backlog(99, 99, 99)), fleet)
    assert crowd.verdict is Verdict.ADMIT
    # the prompt is computed already
    pooled = PLAIN.judge(case(Moment.POOLED, slo_s=None, tpot_s=0.0119, without_slot=ahead), fleet)
    assert pooled.verdict is Verdict.ADMIT


def test_a_colocated_worker_is_waited_for_and_computes_the_prompt_itself() -> None:
    # 4 before it and its own, 2 free: 3 departures at 10/s, then 1,000 tokens at 1 ms
    tier = DecodeTier(1, 10, 8, 0.02, 0.0, 50.0, prompt_token_s=0.001)
    judged = PLAIN.judge(case(queued=waiting(4)), Outlook(colocated=tier))
    assert judged.terms["queue_s"] == pytest.approx(0.3) and judged.terms["prefill_s"] == 1.0
    assert judged.terms["pool_s"] == judged.terms["transfer_s"] == 0.0


def test_of_two_ways_the_shorter_one_counts_unless_the_request_names_its_mode() -> None:
    slow = DecodeTier(1, 10, 0, 0.01, 0.0, 50.0, prompt_token_s=0.003)
    both = Outlook(PREFILL, DECODE, slow)
    assert PLAIN.judge(case(), both).expected_s == 1.26
    assert PLAIN.judge(case(mode=Mode.COLOCATED), both).expected_s == 3.0
    assert PLAIN.judge(case(mode=Mode.DISAGGREGATED), both).expected_s == 1.26


@pytest.mark.parametrize(
    "wrong",
    [
        {"margin": -0.1},
        {"deviations": -1.0},
        {"hold_s": -1.0},
        {"ahead_s": 0.0},
        {"margin": math.nan},
        {"shed_by": "luck"},
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadParameter, match="policy by_wait"):
        ByWait(**wrong)  # type: ignore[arg-type]
