"""Tests of the request's state machine: every stage gets every event, and each end gives back exactly what was held."""

import math
import random
from typing import Any, get_args

import pytest

from policies.request.events import (
    Admitted,
    Cancel,
    EngineFailed,
    EngineLost,
    EngineUnfit,
    Event,
    Output,
    Preempted,
    PrefillDone,
    Reading,
    Reject,
    RenewalDue,
    Renewed,
    RouteDecode,
    RoutePrefill,
    Start,
    Unknown,
)
from policies.request.life import TABLE, Life
from policies.request.retry_after import named_s
from policies.request.stage import Stage
from policies.request.terms import Mode
from tests.policies.request.recorder import COLOCATED_WAY, DONE, EVENTS, NOW_S, WAY, Recorder, at, now

ALL = [
    *((stage, WAY, event) for stage in Stage for event in EVENTS),
    *((stage, COLOCATED_WAY, event) for stage in (Stage.PREFILLING, Stage.DECODING) for event in EVENTS),
]


def listed(life: Life, event: Event) -> bool:
    row = TABLE[life.stage].get(type(event))
    return row is not None and (row.when is None or row.when(life))


def everything(life: Recorder) -> dict[str, Any]:
    return {name: getattr(life, name) for name in Life.__slots__} | {
        "tied": set(life.tied),
        "live": set(life.live),
    }


def test_there_is_an_event_of_each_kind() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    assert {event for rows in TABLE.values() for event in rows} == {type(event) for event in EVENTS}


@pytest.mark.parametrize(
    ("stage", "way", "event"),
    ALL,
    ids=lambda x: x.value if isinstance(x, Stage) else type(x).__name__ if not isinstance(x, dict) else "way",
)
def test_the_table_says_what_every_event_does_in_every_stage(
    stage: Stage, way: dict[Stage, Event], event: Event
) -> None:
    life = at(stage, way)
    before, did = everything(life), list(life.did)
    if listed(life, event):
        assert life.on(event, NOW_S)
        assert life.stage in TABLE[stage][type(event)].leads_to
        assert not life.of("refused")
    else:
        assert not life.on(event, NOW_S)
        assert everything(life) == before
        assert life.did == [*did, ("refused", type(event))]


@pytest.mark.parametrize("event", EVENTS, ids=lambda x: type(x).__name__)
def test_before_it_begins_a_life_takes_nothing_but_start(event: Event) -> None:
    life = Recorder()
    assert life.on(event, NOW_S) == isinstance(event, Start)
    assert bool(life.live) == isinstance(event, Start)


def test_an_action_that_leads_elsewhere_than_the_table_says_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life = at(Stage.DECODING)
    monkeypatch.setitem(life._rows, Cancel, TABLE[Stage.DECODING][Cancel]._replace(leads_to=(Stage.QUEUED,)))
    with pytest.raises(AssertionError, match="Cancel led to done"):
        life.on(Cancel(), NOW_S)


def test_the_ordinary_way_says_everything_once() -> None:
    life = at(Stage.DONE)
    assert life.did == [
        ("submit", "r1", ()),
        ("send_prefill", "p"),
        ("report_prefill", DONE),
        ("send_decode", "d", b"h"),
        ("admitted",),
        ("output", Output(1, True)),
        ("close", "r1", "finished", 1, None),
        ("forget", "r1", "finished"),
        ("finished",),
    ]
    assert not life.tied


def test_a_colocated_request_is_prefilling_until_it_is_admitted_and_has_no_handle() -> None:
    life = at(Stage.PREFILLING, COLOCATED_WAY)
    assert life.of("send_decode") == [("send_decode", "c", None)]
    life.on(Admitted(), NOW_S)
    assert now(life) is Stage.DECODING
    life.on(Cancel(), NOW_S)
    assert life.of("cancel") == [("cancel", "c")]
    assert not life.tied


CANCELLED = {
    Stage.QUEUED: [],
    Stage.LENDING: [("cancel", "l")],
    Stage.PREFILLING: [("cancel", "p")],
    Stage.POOLED: [("release", "p")],
    # the decode engine gives the prefill engine's copy back
    Stage.TRANSFERRING: [("cancel", "d")],
    Stage.DECODING: [("cancel", "d")],
    Stage.DONE: [],
}


@pytest.mark.parametrize("stage", list(Stage), ids=lambda s: s.value)
def test_a_cancellation_gives_back_what_the_stage_holds(stage: Stage) -> None:
    life = at(stage)
    before = len(life.did)
    life.on(Cancel(), NOW_S)
    life.on(Cancel(), NOW_S)
    assert [e for e in life.did[before:] if e[0] in ("cancel", "release")] == CANCELLED[stage]
    (closed,) = life.of("close")
    assert closed[2] == ("finished" if stage is Stage.DONE else "cancelled")
    assert not life.live
    assert not life.tied
    assert not life.of("refused", "failed")


@pytest.mark.parametrize(
    ("stage", "way", "lost", "expected"),
    [
        (Stage.PREFILLING, WAY, "p", []),
        (Stage.PREFILLING, COLOCATED_WAY, "c", []),
        (Stage.POOLED, WAY, "p", []),
        (Stage.TRANSFERRING, WAY, "d", [("release", "p")]),  # nobody will pull the KV
        (Stage.TRANSFERRING, WAY, "p", [("cancel", "d")]),  # d would read freed blocks
        (Stage.DECODING, WAY, "d", []),
    ],
)
def test_a_lost_engine_before_the_first_token_is_a_retry(
    stage: Stage, way: dict[Stage, Event], lost: str, expected: list[tuple[str, str]]
) -> None:
    life = at(stage, way)
    before = len(life.did)
    life.on(EngineLost(lost, "killed"), NOW_S)
    assert [e for e in life.did[before:] if e[0] in ("cancel", "release")] == expected
    assert now(life) is Stage.QUEUED
    task = "prefill" if lost == "p" else "decode"
    assert life.of("close") == [("close", "r1", "failed", 0, (lost, task, "engine_lost"))]
    assert life.of("submit") == [("submit", "r1", ()), ("submit", "r2", (lost,))]
    assert life.of("retried") == [("retried", task, "engine_lost")]
    assert life.live == {"r2"}
    assert not life.tied


def test_retries_are_bounded_and_the_last_failure_is_the_answer() -> None:
    life = at(Stage.QUEUED)
    now_s = NOW_S
    for pause_s in (0.0, 0.25, 0.0):
        life.on(RoutePrefill("p", colocated=False), now_s)
        life.on(EngineFailed("p", "prefill", "overloaded", "full", retryable=True), now_s)
        if pause_s:
            assert not life.router_knows
            now_s += pause_s
            life.wake(now_s)
    assert now(life) is Stage.DONE
    assert len(life.of("submit")) == len(life.of("close")) == 3
    failure = life.end()
    assert (failure.status, failure.code, failure.retry_after_s) == (503, "overloaded", 1.0)
    assert not life.live
    assert not life.tied


@pytest.mark.parametrize(
    ("code", "status"), [("bad_request", 400), ("internal", 502), ("deadline", 504), ("draining", 503)]
)
def test_a_decode_that_fails_before_admission_releases_the_prefill(code: str, status: int) -> None:
    life = at(Stage.TRANSFERRING)
    life.on(EngineFailed("d", "decode", code, "why", retryable=False, param="stop"), NOW_S)
    assert life.of("cancel", "release") == [("release", "p")]
    failure = life.end()
    assert failure.status == status
    assert failure.param == ("stop" if status == 400 else None)
    # where the request itself is at fault, no engine is blamed
    culprit = None if status == 400 else "d"
    assert [closed[4] and closed[4].engine_id for closed in life.of("close")] == [culprit]
    assert not life.tied


def test_a_failed_transfer_is_tried_again() -> None:
    life = at(Stage.TRANSFERRING)
    life.on(EngineFailed("d", "decode", "kv_load", "torn", retryable=True), NOW_S)
    assert life.of("retried") == [("retried", "decode", "kv_load")]
    assert now(life) is Stage.QUEUED


@pytest.mark.parametrize("mode", [None, Mode.DISAGGREGATED])
def test_after_two_failed_transfers_one_engine_does_all_of_it_if_the_client_lets_it(
    mode: Mode | None,
) -> None:
    life = at(Stage.TRANSFERRING)
    life.terms = life.terms._replace(mode=mode)
    life.on(EngineFailed("d", "decode", "kv_load", "torn", retryable=True), NOW_S)
    assert not life.terms.local
    for event in (RoutePrefill("p", colocated=False), DONE, RouteDecode("d")):
        life.on(event, NOW_S)
    life.on(EngineFailed("d", "decode", "kv_load", "torn", retryable=True), NOW_S)
    assert now(life) is Stage.QUEUED
    assert life.terms.local is (mode is None)


@pytest.mark.parametrize("stage", [Stage.QUEUED, Stage.POOLED], ids=lambda s: s.value)
def test_a_rejection_ends_it_without_another_word_to_the_router(stage: Stage) -> None:
    life = at(stage)
    life.on(Reject(429, "queue_full", 3.0), NOW_S)
    # the router gave everything back when it rejected
    assert not life.of("close")
    assert life.of("release") == ([("release", "p")] if stage is Stage.POOLED else [])
    failure = life.end()
    assert (failure.status, failure.code, failure.retry_after_s) == (429, "queue_full", 3.0)
    assert not life.tied


def test_the_words_of_the_admission_policy_reach_the_client() -> None:
    life = at(Stage.QUEUED)
    life.on(Reject(429, "ttft_objective", 7.4, "the first token is expected after 9.1 s"), NOW_S)
    failure = life.end()
    # 7.4 s rounded up, and a second more for some of the ids
    assert failure.retry_after_s in (8.0, 9.0)
    assert failure.retry_after_s == named_s(7.4, "r1")
    assert (failure.status, failure.code) == (429, "ttft_objective")
    assert failure.message == (
        "The server is overloaded (ttft objective): the first token is expected after 9.1 s; "
        f"try again in {failure.retry_after_s:.0f} s."
    )


def test_the_router_may_send_a_pooled_request_to_prefill_again() -> None:
    life = at(Stage.POOLED)
    life.on(RoutePrefill("q", colocated=False), NOW_S)
    assert now(life) is Stage.PREFILLING
    assert life.of("release") == [("release", "p")]
    assert life.of("send_prefill") == [("send_prefill", "p"), ("send_prefill", "q")]
    assert life.tied == {"q"}
    assert life.wake_at_s == 700.0  # the deadline; the lease counts no more
    assert not life.of("close")


def test_a_pooled_request_that_one_engine_computes_again_has_no_handle_of_the_old_kv() -> None:
    life = at(Stage.POOLED)
    life.on(RoutePrefill("c", colocated=True), NOW_S)
    assert life.of("send_decode") == [("send_decode", "c", None)]
    assert now(life) is Stage.PREFILLING
    assert life.on(Admitted(), NOW_S)


def test_an_unconnected_engine_is_avoided() -> None:
    life = at(Stage.QUEUED)
    life.down = {"p"}
    life.on(RoutePrefill("p", colocated=False), NOW_S)
    assert now(life) is Stage.QUEUED
    assert life.of("submit")[-1] == ("submit", "r2", ("p",))
    life.down = {"d"}
    for event in (RoutePrefill("q", colocated=False), DONE, RouteDecode("d")):
        life.on(event, NOW_S)
    assert life.of("release") == [("release", "q")]
    assert life.of("submit")[-1] == ("submit", "r3", ("p", "d"))


@pytest.mark.parametrize(
    ("stage", "way", "engines"),
    [
        (Stage.PREFILLING, WAY, ("p", None)),
        (Stage.PREFILLING, COLOCATED_WAY, (None, "c")),
        (Stage.POOLED, WAY, ("p", None)),
        (Stage.TRANSFERRING, WAY, ("p", "d")),
        (Stage.DECODING, WAY, ("p", "d")),
    ],
)
def test_a_new_router_adopts_what_is_under_way(
    stage: Stage, way: dict[Stage, Event], engines: tuple[str | None, str | None]
) -> None:
    life = at(stage, way)
    life.on(Unknown(), NOW_S)
    assert life.of("adopt") == [("adopt", stage, *engines)]
    life.on(Cancel(), NOW_S)
    assert [closed[1] for closed in life.of("close")] == ["r1"]


def test_a_new_router_is_asked_about_a_request_that_waits() -> None:
    life = at(Stage.QUEUED)
    life.on(Unknown(), NOW_S)
    assert now(life) is Stage.QUEUED
    assert life.of("submit") == [("submit", "r1", ())] * 2
    assert not life.of("adopt")


def test_a_pooled_request_that_a_router_adopts_keeps_the_end_of_its_lease() -> None:
    life = at(Stage.POOLED)
    life.on(Renewed(15.0, "p"), NOW_S + 18)
    life.on(Unknown(), NOW_S + 20)
    assert life.lease_until_s == 133.0
    life.on(RouteDecode("d"), NOW_S + 21)
    assert now(life) is Stage.TRANSFERRING


def test_a_mode_without_engines_is_told_as_such() -> None:
    life = at(Stage.QUEUED, mode=Mode.DISAGGREGATED)
    life.on(Reject(503, "no_disaggregated_engine", 1.0), NOW_S)
    failure = life.end()
    assert (failure.status, failure.code) == (503, "no_disaggregated_engine")
    assert "no disaggregated engine" in failure.message


def test_no_engine_is_503_with_retry_after() -> None:
    life = at(Stage.QUEUED)
    life.on(Reject(503, "no_engine", 2.0), NOW_S)
    failure = life.end()
    assert (failure.status, failure.code, failure.retry_after_s) == (503, "no_engine", 2.0)
    assert "no engine ready" in failure.message
    assert not life.live


def test_a_pooled_request_whose_lease_is_about_to_end_is_computed_again() -> None:
    """The router rescues a pooled request earlier than this, unless it is held up."""
    # a lease of 30 s from 100 s on, less a margin of 2 s, ends at 128 s
    life = at(Stage.POOLED)
    life.wake(127.9)
    assert now(life) is Stage.POOLED
    life.wake(128.0)
    assert now(life) is Stage.QUEUED
    assert life.of("release") == [("release", "p")]
    assert life.of("close") == [("close", "r1", "expired", 0, None)]
    assert life.of("submit")[-1] == ("submit", "r2", ())  # no engine to avoid
    assert life.of("retried") == [("retried", "decode", "pool_timeout")]
    assert not life.of("failed")
    assert life.wake_at_s == 700.0


def test_a_pooled_request_is_given_up_before_its_lease_ends_once_too_often() -> None:
    life = at(Stage.POOLED, max_retries=0)
    life.wake(127.9)
    assert now(life) is Stage.POOLED
    life.wake(128.0)
    assert now(life) is Stage.DONE
    assert life.of("release") == [("release", "p")]
    assert [closed[2] for closed in life.of("close")] == ["expired"]
    failure = life.end()
    assert (failure.status, failure.code, failure.retry_after_s) == (503, "pool_timeout", 1.0)
    assert life.wake_at_s == math.inf


def test_a_short_lease_has_a_margin_of_a_fifth() -> None:
    life = at(Stage.PREFILLING)
    life.on(PrefillDone(5.0, 0, 0), NOW_S)
    life.wake(103.9)
    assert now(life) is Stage.POOLED
    life.wake(104.0)
    assert now(life) is Stage.QUEUED


def waits(life: Recorder, until_s: float, answer: float | None) -> float:
    """Lets time pass, with a lender that answers each question by `answer` seconds. Returns when the life was woken
    last.
    """
    now_s, stage = NOW_S, now(life)
    asked = len(life.of("renew"))
    while life.wake_at_s <= until_s and now(life) is stage:
        now_s = life.wake_at_s
        life.wake(now_s)
        if answer is not None and len(life.of("renew")) > asked and now(life) is stage:
            asked += 1
            life.on(Renewed(answer, "p"), now_s)
    return now_s


def test_a_request_that_waits_for_minutes_keeps_its_kv() -> None:
    """A lease of 30 s from 100 s on is renewed every 10 s for as long as the engine agrees."""
    life = at(Stage.POOLED)
    waits(life, NOW_S + 300, answer=30.0)
    assert now(life) is Stage.POOLED
    assert life.of("renew") == [("renew", "p")] * 30
    assert life.of("report_renewal") == [("report_renewal", 30.0)] * 30
    assert life.lease_until_s == NOW_S + 330
    assert not life.of("retried", "release")
    life.on(RouteDecode("d"), NOW_S + 301)
    assert now(life) is Stage.TRANSFERRING


def test_a_request_that_waits_for_its_decode_engine_keeps_its_kv() -> None:
    """The engine may have it wait for a slot; the router needs to know nothing of this."""
    life = at(Stage.TRANSFERRING)
    assert waits(life, NOW_S + 300, answer=30.0) == NOW_S + 300
    assert now(life) is Stage.TRANSFERRING
    assert life.of("renew") == [("renew", "p")] * 30
    assert not life.of("report_renewal", "retried")
    life.on(Reading(), NOW_S + 301)
    life.on(Admitted(), NOW_S + 305)
    assert not life.on(RenewalDue(), NOW_S + 310)
    life.wake(NOW_S + 310)
    assert len(life.of("renew")) == 30


def test_a_transfer_takes_its_time_from_the_moment_at_which_the_engine_has_a_slot() -> None:
    life = at(Stage.TRANSFERRING, transfer_s=5.0)
    waits(life, NOW_S + 205, answer=30.0)
    life.on(Reading(), NOW_S + 208)
    # a renewal that comes while the KV is read gives the read no more time
    assert waits(life, NOW_S + 212, answer=30.0) == NOW_S + 210
    assert life.lease_until_s == NOW_S + 240
    assert now(life) is Stage.TRANSFERRING
    assert life.wake_at_s == NOW_S + 213
    life.wake(NOW_S + 213)
    assert life.of("retried") == [("retried", "decode", "stalled")]
    assert life.avoid == ("d",)


def test_an_engine_that_has_forgotten_a_request_has_stalled_some_time_after_its_lease() -> None:
    life = at(Stage.TRANSFERRING, transfer_s=50.0)
    # two renewals, then none: the lease ends at 150 s
    waits(life, NOW_S + 25, answer=30.0)
    assert life.lease_until_s == NOW_S + 50
    assert waits(life, NOW_S + 500, answer=None) == NOW_S + 100
    assert life.of("retried") == [("retried", "decode", "stalled")]


@pytest.mark.parametrize("answer", [None, 0.0], ids=["no answer", "a refusal"])
def test_a_lease_that_is_not_renewed_ends_when_it_would_have_ended(answer: float | None) -> None:
    life = at(Stage.POOLED)
    # asked at 110 and at 120 s, given up at 128 s
    assert waits(life, NOW_S + 300, answer) == 128.0
    assert now(life) is Stage.QUEUED
    assert life.of("renew") == [("renew", "p")] * 2
    assert not life.of("report_renewal")
    assert life.of("retried") == [("retried", "decode", "pool_timeout")]


def test_an_answer_that_names_the_same_end_is_no_renewal() -> None:
    """A lender that agrees to no later end names it again at every question; its answers take 0 to 2 s."""
    life = at(Stage.POOLED)
    life.on(Renewed(200.0, "p"), NOW_S + 10)
    for asked_s, took_s in ((20.0, 0.002), (30.0, 2.0), (40.0, 0.0), (50.0, 1e-9)):
        life.on(Renewed(210.0 - asked_s, "p"), NOW_S + asked_s + took_s)
    assert life.of("report_renewal") == [("report_renewal", 200.0)]
    assert (life.lease_until_s, life.times.renewed_s) == (NOW_S + 210, NOW_S + 10)
    # a tenth of the lease of 30 s is a renewal
    life.on(Renewed(153.0, "p"), NOW_S + 60)
    assert life.of("report_renewal")[1:] == [("report_renewal", 153.0)]


def test_an_answer_of_the_engine_that_held_the_kv_before_renews_nothing() -> None:
    """The router had the prompt computed again elsewhere, in the same attempt; the first engine's answer comes late."""
    life = at(Stage.POOLED)
    life.wake(NOW_S + 10)
    life.on(RoutePrefill("q", colocated=False), NOW_S + 10)
    life.on(PrefillDone(30.0, 7, 0, b"h"), NOW_S + 11)
    life.on(Renewed(100.0, "p"), NOW_S + 12)
    assert life.lease_until_s == NOW_S + 41
    assert not life.of("report_renewal")
    life.on(Renewed(100.0, "q"), NOW_S + 13)
    assert life.lease_until_s == NOW_S + 113


def test_one_answer_that_is_lost_loses_no_lease() -> None:
    life = at(Stage.POOLED)
    life.wake(110.0)
    life.wake(120.0)
    life.on(Renewed(30.0, "p"), 120.5)
    life.wake(128.0)
    assert now(life) is Stage.POOLED
    assert life.lease_until_s == 150.5


def test_the_last_renewal_may_be_shorter_and_never_shortens_a_lease() -> None:
    life = at(Stage.POOLED)
    life.on(Renewed(12.0, "p"), NOW_S + 1)  # 130 s is later
    assert life.lease_until_s == NOW_S + 30
    assert not life.of("report_renewal")
    life.on(Renewed(14.0, "p"), NOW_S + 20)
    assert life.lease_until_s == NOW_S + 34
    life.wake(131.9)
    assert now(life) is Stage.POOLED
    life.wake(132.0)
    assert now(life) is Stage.QUEUED


@pytest.mark.parametrize("stage", [s for s in Stage if s is not Stage.DONE], ids=lambda s: s.value)
def test_the_total_deadline_ends_every_stage(stage: Stage) -> None:
    life = at(stage, timeout_s=10.0)
    life.wake(109.0)
    assert now(life) is stage
    life.wake(110.0)
    assert now(life) is Stage.DONE
    assert life.end().status == 504
    assert [closed[2] for closed in life.of("close")] == ["expired"]
    assert not life.tied


def test_it_is_finished_when_its_last_choice_is() -> None:
    life = at(Stage.DECODING, choices=2)
    life.on(Output(1, True), NOW_S)
    assert now(life) is Stage.DECODING
    life.on(Output(1, True), NOW_S)
    assert life.of("finished")
    assert [closed[3] for closed in life.of("close")] == [2]


@pytest.mark.parametrize(("stage", "way"), [(Stage.TRANSFERRING, WAY), (Stage.PREFILLING, COLOCATED_WAY)])
def test_tokens_before_admitted_count_as_admission(stage: Stage, way: dict[Stage, Event]) -> None:
    life = at(stage, way)
    life.on(Output(1, False), NOW_S)
    assert now(life) is Stage.DECODING
    assert life.did[-2:] == [("admitted",), ("output", Output(1, False))]


def test_a_client_that_leaves_at_its_last_token_is_cancelled_once() -> None:
    life = at(Stage.DECODING)
    life.leaves_at_output = True
    assert life.on(Output(1, True), NOW_S)
    assert life.of("cancel") == [("cancel", "d")]
    assert [closed[2] for closed in life.of("close")] == ["cancelled"]
    assert not life.of("finished", "refused")


def test_a_preempted_request_queues_again_in_the_same_attempt() -> None:
    life = at(Stage.DECODING)
    life.on(Output(1, False), NOW_S)
    life.on(Preempted(), NOW_S)
    assert now(life) is Stage.QUEUED
    assert life.of("submit") == [("submit", "r1", ())] * 2
    assert not life.of("close", "cancel", "release")
    assert not life.tied
    for event in list(WAY.values())[:3]:
        life.on(event, NOW_S)
    # its output goes on elsewhere, in another attempt
    life.on(EngineLost("d", "killed"), NOW_S)
    assert life.of("migrated") == [("migrated", "decode", "engine_lost")]


@pytest.mark.parametrize("seed", range(300))
def test_whatever_happens_every_attempt_ends_once_and_holds_nothing(seed: int) -> None:
    rng = random.Random(seed)
    life = Recorder(max_retries=rng.randrange(4))
    life.on(Start(), NOW_S)
    engines = ["p", "d", "c"]
    likely: list[Event] = [*WAY.values(), *COLOCATED_WAY.values()]
    while life.stage is not Stage.DONE:
        life.down = {engine for engine in engines if rng.random() < 0.1}
        event = rng.choice(EVENTS if rng.random() < 0.3 else likely)
        if isinstance(event, EngineLost | EngineFailed | EngineUnfit):
            if not life.tied:
                continue
            engine = rng.choice(sorted(life.tied))  # only an engine with work reports
            event = event._replace(engine_id=engine)
        life.on(event, NOW_S)
        assert len(life.live) == (now(life) is not Stage.DONE)
    assert not life.tied
    assert life.retries <= life.limits.max_retries
    assert life.migrations <= life.limits.max_migrations
    assert life.attempts == life.retries + life.migrations
    ended = [effect[1] for effect in life.of("forget")]
    assert len(ended) == len(set(ended)) == life.attempts + 1
    closed = [effect[1] for effect in life.of("close")]
    assert len(closed) == len(set(closed))
    assert len(life.of("finished", "failed")) <= 1


def test_the_client_waits_from_its_arrival_on_whatever_attempt_it_is() -> None:
    """A retry gets no new TTFT objective; an attempt that resumes output has one from the last token on."""
    life = at(Stage.QUEUED)
    assert life.waits_since_s == life.arrived_s == NOW_S
    life.on(RoutePrefill("p", colocated=False), NOW_S + 1.0)
    life.on(EngineLost("p", "killed"), NOW_S + 2.0)
    assert (life.retries, life.times.submitted_s) == (1, NOW_S + 2.0)
    assert life.waits_since_s == NOW_S

    life = at(Stage.DECODING)
    life.on(Output(3, last=False), NOW_S + 4.0)
    assert life.waits_since_s == NOW_S + 4.0
    life.on(EngineLost("d", "killed"), NOW_S + 6.0)
    assert (life.migrations, life.waits_since_s) == (1, NOW_S + 4.0)
    life.on(RoutePrefill("p", colocated=False), NOW_S + 7.0)
    life.on(EngineLost("p", "killed"), NOW_S + 8.0)
    assert (life.retries, life.waits_since_s) == (1, NOW_S + 4.0)
