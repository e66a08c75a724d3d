"""Tests of what follows when engines fail a request: migrations, retries, limits of stages, poison, and the budget."""

import math

import pytest

from policies.request.events import (
    Admitted,
    Cancel,
    EngineFailed,
    EngineLost,
    EngineUnfit,
    Event,
    Output,
    Reading,
    RouteDecode,
    RoutePrefill,
    Start,
    Unknown,
)
from policies.request.stage import Stage
from policies.request.troubles import ACQUITTED_TOKENS, LOOK_AGAIN_S, SUSPECT_S, pause_s, within_budget
from tests.policies.request.recorder import COLOCATED_WAY, DONE, NOW_S, WAY, Recorder, at, now

TO_DECODING: list[Event] = [RoutePrefill("q", colocated=False), DONE, RouteDecode("e"), Admitted()]
"""The way of a second attempt to DECODING, on other engines."""


def decoding(tokens: int, **more: object) -> Recorder:
    """Returns a life in DECODING whose only choice has `tokens` tokens, the last at NOW_S."""
    life = at(Stage.DECODING, **more)  # type: ignore[arg-type]
    if tokens:
        life.on(Output(tokens, False), NOW_S)
    return life


def go(life: Recorder, events: list[Event], now_s: float) -> None:
    for event in events:
        assert life.on(event, now_s)


@pytest.mark.parametrize(
    ("event", "task", "code", "told"),
    [
        (EngineLost("d", "killed"), "decode", "engine_lost", []),
        (EngineFailed("d", "decode", "engine_dead", "x", True), "decode", "engine_dead", []),
        (EngineFailed("d", "decode", "draining", "x", True), "decode", "draining", []),
        (EngineUnfit("d", "quarantined", "x"), "decode", "quarantined", [("cancel", "d")]),
        (EngineUnfit("d", "stalled", "x"), "decode", "stalled", [("cancel", "d")]),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, tuple) else None,
)
def test_output_goes_on_elsewhere(event: Event, task: str, code: str, told: list[tuple[str, str]]) -> None:
    life = decoding(5)
    life.on(event, NOW_S + 20)
    assert now(life) is Stage.QUEUED
    assert life.of("cancel", "release") == told
    assert life.of("close") == [("close", "r1", "failed", 5, ("d", task, code))]
    assert life.of("submit")[-1] == ("submit", "r2", ("d",))
    assert life.of("migrated") == [("migrated", task, code)]
    assert (life.output_tokens, life.carried_tokens, life.attempt_tokens) == (5, 5, 0)
    go(life, TO_DECODING, NOW_S + 21)
    life.on(Output(2, False), NOW_S + 22)
    # the client's last token came at NOW_S
    assert life.of("resumed") == [("resumed", 22.0)]
    assert (life.output_tokens, life.attempt_tokens) == (7, 2)
    assert life.times.first_s == NOW_S
    life.on(Output(1, True), NOW_S + 23)
    assert life.of("close")[-1] == ("close", "r2", "finished", 3, None)
    assert life.of("finished")
    assert not life.tied


def test_migrations_are_bounded_and_do_not_use_up_retries() -> None:
    life = decoding(100)
    for moved in range(2):
        life.on(EngineLost(str(life.decode_engine), "killed"), NOW_S + 20)
        assert (life.migrations, life.retries) == (moved + 1, 0)
        go(life, TO_DECODING, NOW_S + 21)
        life.on(Output(100, False), NOW_S + 22)
    life.on(EngineLost("e", "killed"), NOW_S + 60)
    failure = life.end()
    assert (failure.status, failure.code) == (502, "engine_lost")
    assert not life.tied


def test_a_resumed_attempt_that_fails_without_output_of_its_own_is_a_retry_that_still_resumes() -> None:
    life = decoding(100)
    life.on(EngineFailed("d", "decode", "internal", "x", True), NOW_S + 20)
    life.on(RoutePrefill("q", colocated=False), NOW_S + 20)
    life.on(EngineFailed("q", "prefill", "internal", "x", True), NOW_S + 20)
    assert (life.migrations, life.retries, life.carried_tokens) == (1, 1, 100)
    assert not life.of("restart")
    go(life, TO_DECODING, NOW_S + 21)
    life.on(Output(1, True), NOW_S + 22)
    assert life.of("finished")
    assert life.of("resumed") == [("resumed", 22.0)]


@pytest.mark.parametrize("sent", [True, False])
def test_who_forbids_migration_gets_an_error_or_an_answer_from_the_start(sent: bool) -> None:
    life = decoding(5, migrate=False)
    life.nothing_sent = not sent
    life.on(EngineLost("d", "killed"), NOW_S + 20)
    assert not life.of("migrated")
    if sent:
        assert life.end().code == "engine_lost"
        return
    assert [effect[0] for effect in life.of("restart", "retried")] == ["restart", "retried"]
    assert (life.output_tokens, life.carried_tokens, life.times.first_s) == (0, 0, None)
    go(life, TO_DECODING, NOW_S + 21)
    life.on(Output(3, True), NOW_S + 22)
    assert life.of("close")[-1] == ("close", "r2", "finished", 3, None)
    assert not life.of("resumed")


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize(("code", "retryable"), [("not_resumable", True), ("bad_request", False)])
def test_output_that_an_engine_cannot_resume(sent: bool, code: str, retryable: bool) -> None:
    life = decoding(5)
    life.nothing_sent = not sent
    life.on(EngineFailed("d", "decode", "internal", "x", True), NOW_S)
    go(life, TO_DECODING[:3], NOW_S)
    life.on(EngineFailed("e", "decode", code, "no such tools here", retryable), NOW_S)
    if sent:
        failure = life.end()
        assert failure.code == "not_resumable"
        assert "no such tools here" in failure.message
    else:
        assert life.of("restart")
        assert now(life) is Stage.QUEUED


def test_what_the_engine_calls_final_is_final() -> None:
    life = decoding(5)
    life.on(EngineFailed("d", "decode", "internal", "x", retryable=False), NOW_S)
    assert life.end().status == 502


def test_a_request_of_several_choices_becomes_one_for_each_that_has_not_finished() -> None:
    life = at(Stage.DECODING, choices=4)
    life.on(Output(2, False), NOW_S)
    life.choice = 1
    life.on(Output(7, True), NOW_S)
    life.choice = 2
    life.on(Output(3, False), NOW_S)
    life.on(EngineLost("d", "killed"), NOW_S + 20)
    assert life.of("close") == [("close", "r1", "failed", 12, ("d", "decode", "engine_lost"))]
    lives = [life, *life.others]
    assert [(one.tokens, one.carried_tokens, one.choices) for one in lives] == [
        ({0: 2}, 2, 1),
        ({2: 3}, 3, 1),
        ({3: 0}, 0, 1),
    ]
    for one in lives:
        assert now(one) is Stage.QUEUED
        assert one.of("submit")[-1][2] == ("d",)
        assert (one.migrations, one.times.first_s) == (1, NOW_S)
        go(one, TO_DECODING, NOW_S + 21)
        one.on(Output(1, True), NOW_S + 22)
        assert one.of("finished")
        assert one.of("resumed") == [("resumed", 22.0)]
        assert not one.tied


def test_a_part_that_fails_at_once_keeps_the_others_from_beginning() -> None:
    life = at(Stage.DECODING, choices=2)
    life.on(Output(2, False), NOW_S)

    def cancelled() -> None:
        Recorder.submit(life)
        # the failure of another part of the same answer
        life.on(Cancel(), NOW_S)

    life.submit = cancelled  # type: ignore[method-assign]
    life.on(EngineLost("d", "killed"), NOW_S + 20)
    assert now(life) is Stage.DONE
    (other,) = life.others
    assert not other.did


# ------------------------------------------------------------------------------------------------------- unfit engines


@pytest.mark.parametrize(
    ("stage", "way", "engine", "code", "told"),
    [
        (Stage.PREFILLING, WAY, "p", "quarantined", [("cancel", "p")]),
        (Stage.PREFILLING, COLOCATED_WAY, "c", "quarantined", [("cancel", "c")]),
        # its work is done, and the KV can still be read
        (Stage.POOLED, WAY, "p", "quarantined", None),
        (Stage.TRANSFERRING, WAY, "p", "quarantined", None),
        (Stage.POOLED, WAY, "p", "stalled", [("release", "p")]),
        # an engine that stands still frees nothing at the other one
        (Stage.TRANSFERRING, WAY, "d", "stalled", [("cancel", "d"), ("release", "p")]),
        (Stage.TRANSFERRING, WAY, "p", "stalled", [("cancel", "d")]),
    ],
)
def test_before_the_first_token_an_unfit_engine_is_left_by_a_retry(
    stage: Stage, way: dict[Stage, Event], engine: str, code: str, told: list[tuple[str, str]] | None
) -> None:
    life = at(stage, way)
    assert life.on(EngineUnfit(engine, code, "so"), NOW_S)
    if told is None:
        assert now(life) is stage
        return
    assert now(life) is Stage.QUEUED
    assert life.of("submit")[-1] == ("submit", "r2", (engine,))
    assert not life.of("migrated")
    assert set(told) <= set(life.of("cancel", "release"))
    assert life.of("close")[0][4].code == code
    assert not life.tied


# ------------------------------------------------------------------------------------------------------ limits of time


@pytest.mark.parametrize(
    ("stage", "way", "limit", "blamed", "told"),
    [
        (Stage.PREFILLING, WAY, "prefill_s", ("p", "prefill"), [("cancel", "p")]),
        (Stage.PREFILLING, COLOCATED_WAY, "prefill_s", ("c", "decode"), [("cancel", "c")]),
        (Stage.TRANSFERRING, WAY, "transfer_s", ("d", "decode"), [("cancel", "d"), ("release", "p")]),
        (Stage.DECODING, WAY, "token_gap_s", ("d", "decode"), [("cancel", "d")]),
    ],
)
def test_an_engine_that_takes_too_long_is_left(
    stage: Stage, way: dict[Stage, Event], limit: str, blamed: tuple[str, str], told: list[tuple[str, str]]
) -> None:
    life = at(stage, way, **{limit: 50.0})
    if stage is Stage.TRANSFERRING:
        life.on(Reading(), NOW_S)
    # the lease is renewed while a decode engine takes its time
    assert life.wake_at_s == (110.0 if stage is Stage.TRANSFERRING else 150.0)
    life.wake(149.9)
    assert now(life) is stage
    life.wake(150.0)
    assert now(life) is Stage.QUEUED
    assert life.of("cancel", "release") == told
    assert life.of("close") == [("close", "r1", "failed", 0, (*blamed, "stalled"))]
    assert life.of("submit")[-1] == ("submit", "r2", (blamed[0],))
    assert life.of("retried") == [("retried", blamed[1], "stalled")]


def test_the_gap_between_tokens_counts_from_the_last_one_and_leads_to_a_migration() -> None:
    life = at(Stage.DECODING, token_gap_s=50.0)
    for now_s in (120.0, 149.0):
        life.on(Output(1, False), now_s)
        # a token sets no alarm
        assert life.wake_at_s == 150.0
    life.wake(150.0)
    assert now(life) is Stage.DECODING
    assert life.wake_at_s == 199.0
    life.wake(199.0)
    assert now(life) is Stage.QUEUED
    assert life.of("migrated") == [("migrated", "decode", "stalled")]


def test_a_driver_that_was_held_up_itself_takes_nobody_for_stalled() -> None:
    life = at(Stage.DECODING, token_gap_s=50.0)
    life.on(Output(1, False), NOW_S)
    life.forbear(205.0)
    life.wake(200.0)
    assert now(life) is Stage.DECODING
    life.on(Output(1, False), 203.0)
    life.wake(205.0)
    assert now(life) is Stage.DECODING
    assert life.wake_at_s == 253.0
    # a lease ends at its engine whatever happens here
    pooled = at(Stage.POOLED)
    pooled.forbear(500.0)
    pooled.wake(128.0)
    assert now(pooled) is Stage.QUEUED


def test_forbearance_wakes_no_request_that_has_ended() -> None:
    life = at(Stage.DECODING, idle_s=60.0)
    life.on(Output(1, False), NOW_S)
    life.on(Cancel(), NOW_S)
    life.forbear(205.0)
    assert now(life) is Stage.DONE
    assert life.wake_at_s == math.inf


@pytest.mark.parametrize("way", [WAY, COLOCATED_WAY], ids=["split", "colocated"])
def test_an_answer_to_which_no_token_is_added_ends(way: dict[Stage, Event]) -> None:
    life = at(Stage.DECODING, way, idle_s=50.0)
    # what bounds the wait for the first token are the limits of the stages
    assert life.wake_at_s == life.deadline_s
    for now_s in (120.0, 149.0):
        life.on(Output(1, False), now_s)
        # a later token sets no alarm
        assert life.wake_at_s == 170.0
    life.wake(170.0)
    assert now(life) is Stage.DECODING
    assert life.wake_at_s == 199.0
    life.wake(198.9)
    assert now(life) is Stage.DECODING
    life.wake(199.0)
    failure = life.end()
    assert (failure.status, failure.code) == (504, "idle")
    assert life.of("cancel") == [("cancel", life_engine(way))]
    assert life.of("close") == [("close", "r1", "expired", 2, None)]
    assert not life.tied
    assert life.wake_at_s == math.inf


def life_engine(way: dict[Stage, Event]) -> str:
    """Returns the engine that decodes at the end of a way."""
    return "c" if way is COLOCATED_WAY else "d"


@pytest.mark.parametrize("events", range(4), ids=["queued", "prefilling", "pooled", "transferring"])
def test_another_engine_does_not_begin_the_time_without_tokens_anew(events: int) -> None:
    life = decoding(5, idle_s=50.0, token_gap_s=30.0)
    life.wake(NOW_S + 30)
    assert life.of("migrated") == [("migrated", "decode", "stalled")]
    go(life, TO_DECODING[:events], NOW_S + 31)
    life.wake(NOW_S + 49.9)
    assert not life.of("failed")
    assert life.wake_at_s <= NOW_S + 50
    life.wake(NOW_S + 50)
    assert life.end().code == "idle"
    assert not life.tied


def test_a_token_of_the_next_engine_begins_the_time_without_tokens_anew() -> None:
    life = decoding(5, idle_s=50.0)
    life.on(EngineLost("d", "killed"), NOW_S + 20)
    go(life, TO_DECODING, NOW_S + 40)
    life.on(Output(1, False), NOW_S + 45)
    life.wake(NOW_S + 94.9)
    assert now(life) is Stage.DECODING
    # a retry without output of its own changes nothing
    life.on(EngineLost("e", "killed"), NOW_S + 94.9)
    go(life, TO_DECODING[:1], NOW_S + 94.9)
    life.on(EngineFailed("q", "prefill", "draining", "x", True), NOW_S + 94.9)
    assert (life.migrations, life.retries) == (2, 1)
    assert life.wake_at_s == NOW_S + 95
    life.wake(NOW_S + 95)
    assert life.end().code == "idle"


def test_an_answer_that_begins_anew_waits_for_its_first_token_as_any_other() -> None:
    life = decoding(5, migrate=False, idle_s=50.0)
    life.nothing_sent = True
    life.on(EngineLost("d", "killed"), NOW_S + 20)
    assert life.of("restart")
    assert life.wake_at_s == life.deadline_s


def test_each_choice_that_goes_on_alone_keeps_the_time_of_the_last_token() -> None:
    life = at(Stage.DECODING, choices=2, idle_s=50.0)
    life.on(Output(2, False), NOW_S + 5)
    life.on(EngineLost("d", "killed"), NOW_S + 20)
    for one in (life, *life.others):
        assert one.wake_at_s == NOW_S + 55
        one.wake(NOW_S + 55)
        assert one.end().code == "idle"
    assert len(life.others) == 1


def test_a_driver_that_was_held_up_itself_takes_no_answer_for_idle() -> None:
    life = decoding(1, idle_s=50.0)
    life.forbear(205.0)
    life.wake(200.0)
    life.on(Output(1, False), 203.0)
    life.wake(205.0)
    assert now(life) is Stage.DECODING
    assert life.wake_at_s == 253.0


# ---------------------------------------------------------------------------------------------------------- poison


def deaths(life: Recorder, tokens: list[int], ran_s: float) -> int:
    """Has engine after engine take the request, send its number of `tokens`, and die after `ran_s`; counts the dead."""
    now_s = NOW_S
    for died, n in enumerate(tokens):
        go(life, TO_DECODING if died else TO_DECODING[:1], now_s)
        if died == 0:
            go(life, TO_DECODING[1:], now_s)
        if n:
            life.on(Output(n, False), now_s)
        now_s += ran_s
        life.on(EngineLost("e", "killed"), now_s)
        if now(life) is Stage.DONE:
            return died + 1
    return len(tokens)


@pytest.mark.parametrize(
    ("tokens", "ran_s", "dead", "code"),
    [
        # it kills at once
        ([0, 0, 0], 1.0, 2, "request_kills_engines"),
        ([ACQUITTED_TOKENS, 0, 0], 5.0, 2, "request_kills_engines"),
        # engines that had it for longer died of something else
        ([0, 0, 0], SUSPECT_S + 1, 3, None),
        # some engine got on with it
        ([500, 0, 0], 5.0, 3, None),
        ([ACQUITTED_TOKENS + 1, 0, 0], 5.0, 3, None),
        ([0, ACQUITTED_TOKENS + 1, 0], 5.0, 3, None),
    ],
)
def test_a_request_under_which_engines_die_is_refused(
    tokens: list[int], ran_s: float, dead: int, code: str | None
) -> None:
    life = Recorder(max_retries=5)
    life.on(Start(), NOW_S)
    assert deaths(life, tokens, ran_s) == dead
    if code is None:
        assert now(life) is Stage.QUEUED
    else:
        failure = life.end()
        assert (failure.status, failure.code) == (500, code)
        # the router still hears of the engine
        assert life.of("close")[-1][4] == ("e", "decode", "engine_lost")
        assert not life.tied


@pytest.mark.parametrize(
    ("age_s", "silent_s", "guilty"),
    [(1.0, 0.0, True), (3.0, 4.0, False), (5.0, 4.0, True), (60.0, math.inf, False), (15.0, 4.0, False)],
)
def test_a_request_that_came_to_a_silent_engine_did_not_silence_it(
    age_s: float, silent_s: float, guilty: bool
) -> None:
    life = Recorder(max_retries=5)
    life.on(Start(), NOW_S)
    silences = 0
    while now(life) is not Stage.DONE and silences < 5:
        silences += 1
        go(life, TO_DECODING[:3], NOW_S)
        life.on(EngineLost("e", "silent", silent_s), NOW_S + age_s)
    assert (now(life) is Stage.DONE) == guilty
    # an engine that only falls silent counts as half a death
    assert silences == (2 if silent_s == 0 else 4 if guilty else 5)


@pytest.mark.parametrize(("age_s", "guilty"), [(3.0, False), (6.0, True)])
def test_a_request_that_came_to_a_stalled_engine_did_not_stop_it(age_s: float, guilty: bool) -> None:
    life = Recorder(max_retries=5)
    life.on(Start(), NOW_S)
    for stalls in range(1, 5):
        go(life, TO_DECODING[:3], NOW_S)
        life.on(EngineFailed("e", "decode", "stalled", "it stands still", True, silent_s=4.0), NOW_S + age_s)
        assert (now(life) is Stage.DONE) == (guilty and stalls == 4)


def test_what_kills_a_prefill_engine_never_comes_to_a_decode_engine() -> None:
    life = Recorder(max_retries=9)
    life.on(Start(), NOW_S)
    for _ in range(2):
        go(life, TO_DECODING[:1], NOW_S)
        life.on(EngineLost("q", "killed"), NOW_S)
        go(life, TO_DECODING[:3], NOW_S)
        life.on(EngineLost("e", "killed"), NOW_S)
    assert now(life) is Stage.QUEUED
    go(life, TO_DECODING[:3], NOW_S)
    life.on(EngineLost("e", "killed"), NOW_S)
    assert life.end().code == "request_kills_engines"


def test_a_prefill_engine_that_dies_after_its_work_was_not_killed_by_it() -> None:
    life = at(Stage.POOLED, max_retries=5)
    for _ in range(3):
        life.on(EngineLost("p", "killed"), NOW_S)
        assert now(life) is Stage.QUEUED
        go(life, [RoutePrefill("p", colocated=False), DONE], NOW_S)


# ------------------------------------------------------------------------------------------------- avoidance, budget


def test_a_failed_load_has_two_suspects() -> None:
    life = at(Stage.TRANSFERRING)
    life.on(EngineFailed("d", "decode", "kv_load", "torn", retryable=True), NOW_S)
    assert life.of("submit")[-1] == ("submit", "r2", ("p", "d"))
    assert life.of("close") == [("close", "r1", "failed", 0, ("d", "decode", "kv_load"))]


@pytest.mark.parametrize(
    ("event", "asked"),
    [
        (EngineFailed("d", "decode", "kv_load", "torn", True), True),
        (EngineFailed("d", "decode", "internal", "bug", True), True),
        (EngineFailed("d", "decode", "draining", "ends", True), False),
        (EngineFailed("d", "decode", "stalled", "stands", True), False),
        (EngineLost("d", "killed"), False),
        (EngineUnfit("d", "quarantined", "x"), False),
    ],
    ids=lambda x: x[2] if isinstance(x, EngineFailed) else None,
)
@pytest.mark.parametrize("tokens", [0, 5])
def test_only_failures_that_an_engine_answered_count_against_the_retry_budget(
    event: Event, asked: bool, tokens: int
) -> None:
    life = decoding(tokens)
    life.budget = False
    life.on(event, NOW_S)
    assert now(life) is Stage.QUEUED
    assert not life.on_budget
    assert (len(life.of("submit")) == 1) == asked
    assert life.wake_at_s == (NOW_S + LOOK_AGAIN_S if asked else life.deadline_s)


def held() -> Recorder:
    """Returns a life whose second attempt waits for the retry budget."""
    life = at(Stage.TRANSFERRING)
    life.budget = False
    life.on(EngineFailed("d", "decode", "internal", "bug", True), NOW_S)
    assert not life.tied
    assert not life.router_knows
    return life


def test_an_attempt_without_room_in_the_budget_waits_for_it() -> None:
    life = held()
    life.wake(NOW_S + LOOK_AGAIN_S)
    life.on(Unknown(), NOW_S + LOOK_AGAIN_S)
    assert len(life.of("submit")) == 1
    life.budget = True
    life.wake(NOW_S + 2 * LOOK_AGAIN_S)
    assert life.of("submit")[1:] == [("submit", "r2", ("d",))]
    assert life.on_budget
    assert life.wake_at_s == life.deadline_s


@pytest.mark.parametrize(("retries", "pause"), [(1, 0.0), (2, 0.25), (3, 0.5), (5, 2.0), (20, 2.0)])
def test_the_first_retry_follows_at_once_and_each_further_one_after_a_longer_pause(
    retries: int, pause: float
) -> None:
    assert pause_s(retries) == pause


def test_where_only_a_stalled_engine_is_known_retries_wait_for_others() -> None:
    """A process that stood still knows one engine first. Twenty retries in ten milliseconds would all go there."""
    life = at(Stage.QUEUED, max_retries=5)
    life.budget = False
    now_s = NOW_S
    for wait_s in (0.0, 0.25, 0.5):
        life.on(RoutePrefill("p", colocated=False), now_s)
        life.on(EngineFailed("p", "prefill", "stalled", "its core stands still", True, silent_s=20.0), now_s)
        assert life.router_knows == (not wait_s)
        now_s += wait_s
        if wait_s:
            assert life.wake_at_s == now_s
            # it needs no room in the budget
            life.wake(now_s)
        assert life.router_knows and not life.on_budget
    life.on(RoutePrefill("other", colocated=False), now_s)
    life.on(EngineFailed("other", "prefill", "stalled", "its core stands still", True, silent_s=20.0), now_s)
    assert life.router_knows
    assert life.of("submit")[-1] == ("submit", "r5", ("p", "other"))


def test_an_attempt_does_not_wait_for_ever_for_the_budget() -> None:
    life = held()
    while life.stage is Stage.QUEUED:
        life.wake(life.wake_at_s)
    assert life.of("forget")[-1] == ("forget", "r2", "failed")
    assert len(life.of("close")) == 1
    failure = life.end()
    assert (failure.status, failure.code) == (503, "retry_budget")


def test_an_attempt_that_waits_for_the_budget_can_be_cancelled_and_has_its_deadline() -> None:
    life = held()
    life.on(Cancel(), NOW_S)
    assert life.stage is Stage.DONE
    late = held()
    late.deadline_s = NOW_S + LOOK_AGAIN_S / 2
    late.wake(NOW_S + LOOK_AGAIN_S)
    assert late.end().code == "deadline"


def test_an_attempt_on_the_budget_says_so_until_the_next_one() -> None:
    life = at(Stage.TRANSFERRING)
    life.on(EngineFailed("d", "decode", "internal", "bug", True), NOW_S)
    assert life.on_budget
    life.on(RoutePrefill("p", colocated=False), NOW_S)
    life.on(EngineLost("p", "killed"), NOW_S)
    assert not life.on_budget


def test_an_attempt_is_off_the_budget_when_its_engine_has_sent_something() -> None:
    life = at(Stage.TRANSFERRING)
    life.on(EngineFailed("d", "decode", "internal", "bug", True), NOW_S)
    life.on(RoutePrefill("p", colocated=True), NOW_S)
    assert life.on_budget
    life.on(Output(1, False), NOW_S)
    assert not life.on_budget
    life.on(Output(1, False), NOW_S)
    assert life.retries_counted == 0


@pytest.mark.parametrize(
    ("retries", "open_requests", "room"),
    # 20 % of 15 are the 3 that are always allowed; 20 % of 100 are 20
    [(2, 1, True), (3, 15, False), (3, 16, True), (19, 100, True), (20, 100, False)],
)
def test_the_budget(retries: int, open_requests: int, room: bool) -> None:
    assert within_budget(retries, open_requests) is room


def test_without_limits_no_stage_is_overdue() -> None:
    life = at(Stage.DECODING, timeout_s=math.inf)
    assert life.wake_at_s == math.inf
