"""A prefill borrows the head of its prompt: engine l lends to engine p, and whatever goes wrong with l, p computes."""

import random

import pytest

from policies.request.events import (
    Cancel,
    DeadlinePassed,
    EngineFailed,
    EngineLost,
    EngineUnfit,
    Event,
    Lend,
    PrefillDone,
    RoutePrefill,
    StageOverdue,
    Start,
    Unknown,
)
from policies.request.stage import Stage
from tests.policies.request.recorder import EVENTS, LEND_WAY, LENT, NOW_S, Recorder, at, now

BORROWS = RoutePrefill("p", colocated=False, lend=Lend("l", 64, 20.0))
DONE = PrefillDone(30.0, 999, 1, b"h", engine_id="p")


def test_the_prefix_is_lent_and_read_before_the_prompt_is_computed() -> None:
    life = at(Stage.PREFILLING, LEND_WAY)
    assert life.did[1:] == [("send_lend", "l", 64), ("send_prefill", "p", b"prefix")]
    assert life.tied == {"l", "p"}
    life.on(DONE, NOW_S)
    assert now(life) is Stage.POOLED
    # a prefix that was not read is freed now, one that was read is free already
    assert life.of("release") == [("release", "l")]
    assert life.tied == {"p"}
    # one token of the prompt was cached, so the prefix was not
    assert life.loans == ["recomputed"]


@pytest.mark.parametrize(
    ("event", "cancelled"),
    [
        (EngineFailed("l", "prefill", "bad_request", "x", retryable=False), []),
        (EngineFailed("l", "prefill", "draining", "x", retryable=True), []),
        (EngineLost("l", "gone"), []),
        (EngineUnfit("l", "stalled", "so the router says"), [("cancel", "l")]),
        (EngineUnfit("l", "quarantined", "so the router says"), [("cancel", "l")]),
        (StageOverdue(), [("cancel", "l")]),
    ],
)
def test_whatever_goes_wrong_at_the_lender_the_prompt_is_computed(
    event: Event, cancelled: list[tuple[str, str]]
) -> None:
    life = at(Stage.LENDING)
    life.on(event, NOW_S + 1)
    assert now(life) is Stage.PREFILLING
    assert life.of("send_prefill") == [("send_prefill", "p")]
    assert life.of("cancel") == cancelled
    assert (life.attempts, life.kills, life.tied) == (0, 0.0, {"p"})
    assert life.loans == ["failed"]


@pytest.mark.parametrize(
    "late",
    [
        EngineFailed("l", "prefill", "bad_request", "x", retryable=False),
        EngineFailed("l", "prefill", "draining", "x", retryable=True),
        EngineLost("l", "gone"),
        EngineUnfit("l", "stalled", "so the router says"),
    ],
)
def test_a_late_failure_of_a_lender_that_was_left_changes_nothing(late: Event) -> None:
    life = at(Stage.LENDING)
    life.on(StageOverdue(), NOW_S + 1)
    before = list(life.did)
    life.on(late, NOW_S + 2)
    assert now(life) is Stage.PREFILLING
    assert (life.did, life.attempts, life.kills) == (before, 0, 0.0)


def test_a_lender_that_takes_too_long_is_left_and_its_late_answer_means_nothing() -> None:
    life = at(Stage.LENDING)
    life.wake(NOW_S + 19.9)
    assert now(life) is Stage.LENDING
    life.wake(NOW_S + 20.0)
    assert now(life) is Stage.PREFILLING
    life.on(LENT, NOW_S + 20.1)
    assert now(life) is Stage.PREFILLING and life.prefilled is None
    life.on(DONE, NOW_S + 21)
    assert now(life) is Stage.POOLED and life.prefilled == DONE
    assert life.loans == ["failed"]


def test_a_lender_that_is_not_connected_is_not_asked() -> None:
    life = at(Stage.QUEUED)
    life.down.add("l")
    life.on(BORROWS, NOW_S)
    assert now(life) is Stage.PREFILLING
    assert life.of("send_lend", "send_prefill") == [("send_prefill", "p")]
    life.on(DONE, NOW_S)
    assert life.loans == []


@pytest.mark.parametrize(
    "event",
    [
        EngineLost("l", "gone"),
        EngineFailed("l", "prefill", "stalled", "x", retryable=True),
        EngineUnfit("l", "stalled", "so the router says"),
    ],
)
def test_a_lender_that_goes_while_its_prefix_is_read_leaves_the_prefill_alone(event: Event) -> None:
    life = at(Stage.PREFILLING, LEND_WAY)
    life.on(event, NOW_S + 1)
    assert now(life) is Stage.PREFILLING and not life.of("cancel", "retried")
    life.on(DONE, NOW_S + 2)
    assert now(life) is Stage.POOLED and life.tied == {"p"}
    assert life.loans == ["recomputed"]


def test_a_prefill_engine_that_is_not_connected_gives_the_lent_prefix_back() -> None:
    life = at(Stage.LENDING)
    life.down.add("p")
    life.on(LENT, NOW_S)
    assert now(life) is Stage.QUEUED and life.attempts == 1
    assert life.of("cancel") == [("cancel", "l")] and not life.tied
    assert life.loans == ["dropped"]


@pytest.mark.parametrize("event", [EngineLost("p", "gone"), Cancel(), DeadlinePassed()])
def test_a_prefill_that_ends_early_has_its_prefix_freed(event: Event) -> None:
    life = at(Stage.PREFILLING, LEND_WAY)
    life.on(event, NOW_S + 1)
    assert life.of("release") == [("release", "l")]
    assert not life.tied
    assert life.loans == ["dropped"]


def test_a_retry_borrows_nothing_from_before() -> None:
    life = at(Stage.PREFILLING, LEND_WAY)
    life.on(EngineLost("p", "gone"), NOW_S + 1)
    life.on(RoutePrefill("q", colocated=False), NOW_S + 2)
    assert life.of("send_prefill")[-1] == ("send_prefill", "q")
    life.on(DONE._replace(engine_id="q"), NOW_S + 3)
    assert life.loans == ["dropped"]


@pytest.mark.parametrize(("cached", "how"), [(63, "recomputed"), (64, "used"), (80, "used")])
def test_a_loan_was_of_use_where_the_prefill_found_the_whole_prefix(cached: int, how: str) -> None:
    life = at(Stage.PREFILLING, LEND_WAY)
    life.on(DONE._replace(cached_tokens=cached), NOW_S)
    assert life.loans == [how]
    # nothing is said once more when the KV is given up and the prompt computed again without a loan
    life.on(RoutePrefill("p", colocated=False), NOW_S + 1)
    life.on(DONE, NOW_S + 2)
    assert life.loans == [how]


@pytest.mark.parametrize("event", [Cancel(), DeadlinePassed()])
def test_a_request_that_ends_while_it_waits_for_a_loan_drops_it(event: Event) -> None:
    life = at(Stage.LENDING)
    life.on(event, NOW_S + 1)
    assert life.of("cancel") == [("cancel", "l")]
    assert life.loans == ["dropped"]


def test_a_loan_that_has_failed_is_not_dropped_too() -> None:
    life = at(Stage.LENDING)
    life.down.add("p")
    life.on(EngineLost("l", "gone"), NOW_S + 1)
    assert now(life) is Stage.QUEUED and life.attempts == 1
    assert life.loans == ["failed"]


def test_a_new_router_learns_that_the_prefill_has_begun() -> None:
    life = at(Stage.LENDING)
    life.on(Unknown(), NOW_S)
    assert life.of("adopt") == [("adopt", Stage.LENDING, None, None)]
    assert now(life) is Stage.LENDING


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_every_loan_ends_once_and_nothing_is_held(seed: int) -> None:
    rng = random.Random(seed)
    life = Recorder(max_retries=rng.randrange(4))
    life.on(Start(), NOW_S)
    likely: list[Event] = [*LEND_WAY.values(), BORROWS, LENT]
    while life.stage is not Stage.DONE:
        life.down = {engine for engine in ("p", "d", "l") if rng.random() < 0.1}
        event = rng.choice(EVENTS if rng.random() < 0.3 else likely)
        if isinstance(event, EngineLost | EngineFailed | EngineUnfit):
            if not life.tied:
                continue
            event = event._replace(engine_id=rng.choice(sorted(life.tied)))
        life.on(event, NOW_S)
    assert len(life.loans) == len(life.of("send_lend"))
    assert not life.tied
