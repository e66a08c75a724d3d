"""The end of a request: its parts add up, and are told once."""

import pytest

from policies.request.ended import RequestEnd, Result, Tally
from policies.request.stage import Outcome
from policies.request.terms import Terms


def test_a_request_of_one_part_is_told_at_once() -> None:
    tally = Tally("batch", arrived_s=10.0, choices=1)
    # 4 tokens after the first in 2 s
    assert tally.ends("finished", 10.5, 12.5, 5) == RequestEnd("finished", "batch", 0.5, 0.5, 5)


def test_the_last_part_tells_the_end_of_all() -> None:
    tally = Tally("standard", arrived_s=0.0, choices=3)
    # one choice has finished with 7 tokens; the other two go on apart
    tally.split(1, 7)
    assert tally.ends("finished", 1.0, 5.0, 10) is None
    # 30 tokens in 3 choices are 10 each: 9 after the first, in 9 s
    assert tally.ends("finished", 1.5, 10.0, 13) == RequestEnd("finished", "standard", 1.0, 1.0, 30)


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (("cancelled", "failed"), "failed"),
        (("failed", "cancelled"), "failed"),
        (("finished", "expired"), "expired"),
        (("rejected", "cancelled"), "rejected"),
        (("finished", "cancelled"), "cancelled"),
    ],
)
def test_the_worst_part_is_the_outcome(parts: tuple[Outcome, Outcome], whole: Outcome) -> None:
    tally = Tally("standard", 0.0, 2)
    tally.split(1, 0)
    assert tally.ends(parts[0], None, None, 0) is None
    ended = tally.ends(parts[1], None, None, 0)
    assert ended == RequestEnd(whole, "standard", None, None, 0)


def test_one_token_has_no_time_per_later_token() -> None:
    assert Tally("standard", 0.0, 1).ends("finished", 0.25, 0.25, 1) == RequestEnd(
        "finished", "standard", 0.25, None, 1
    )


BOTH = Terms(ttft_slo_s=0.5, tpot_slo_s=0.1)


@pytest.mark.parametrize(
    ("outcome", "ttft_s", "tpot_s", "terms", "result"),
    [
        ("finished", 0.5, 0.1, BOTH, "met"),
        ("finished", 0.51, 0.2, BOTH, "ttft"),
        ("finished", 0.2, 0.11, BOTH, "tpot"),
        ("finished", 0.2, None, BOTH, "met"),
        ("finished", 9.0, 0.05, Terms(tpot_slo_s=0.1), "met"),
        ("finished", 9.0, 9.0, Terms(), None),
        ("cancelled", 9.0, 9.0, BOTH, None),
        ("rejected", None, None, BOTH, "rejected"),
        ("expired", 0.1, 0.01, BOTH, "expired"),
        ("failed", None, None, BOTH, "failed"),
        ("failed", None, None, Terms(), None),
    ],
)
def test_what_became_of_the_objectives(
    outcome: Outcome, ttft_s: float | None, tpot_s: float | None, terms: Terms, result: Result | None
) -> None:
    assert RequestEnd(outcome, "standard", ttft_s, tpot_s, 3).result(terms) == result
