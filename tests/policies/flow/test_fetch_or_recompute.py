"""Fetching a prefix against computing it again: the arithmetic by hand, and what is refused."""

import dataclasses
import math
from typing import Any

import pytest

from policies.flow.base import BadEvent
from policies.flow.fetch_or_recompute import Ahead, FetchConfig, FetchReason, Prefix, choose
from policies.routing.params import BadParameter

HERE = Prefix(
    tokens=2000,
    size=50_000_000,
    lend_s=0.1,
    compute_s_per_token=0.001,
    bytes_per_s=5e7,
)
"""Fetch 0.1 + 5e7 / 5e7 = 1.1 s, recompute 2 s."""


def test_both_alternatives_by_hand() -> None:
    choice = choose(HERE, FetchConfig())
    assert (choice.fetch, choice.reason) == (True, FetchReason.FASTER)
    assert (choice.fetch_s, choice.recompute_s) == (pytest.approx(1.1), pytest.approx(2.0))
    assert choice.terms == {"lend_s": 0.1, "move_s": 1.0, "tokens": 2000.0}


@pytest.mark.parametrize(
    ("change", "reason", "fetch_s"),
    [
        # 5e7 / 3.125e7 = 1.6 s -> 1.7 s, no longer 25 % faster than 2 s
        ({"bytes_per_s": 3.125e7}, FetchReason.SLOWER, 1.7),
        ({"lend_s": 0.5}, FetchReason.FASTER, 1.5),
        ({"lend_s": 0.6}, FetchReason.SLOWER, 1.6),  # 1.6 * 1.25 = 2.0, not below it
        ({"tokens": 255, "compute_s_per_token": 1.0}, FetchReason.TOO_SHORT, 1.1),
        ({"lender_kv_used": 0.9}, FetchReason.LENDER_FULL, 1.1),
    ],
)
def test_when_a_prefix_is_not_fetched(change: dict[str, Any], reason: FetchReason, fetch_s: float) -> None:
    choice = choose(dataclasses.replace(HERE, **change), FetchConfig())
    assert choice.reason is reason
    assert choice.fetch is (reason is FetchReason.FASTER)
    assert choice.fetch_s == pytest.approx(fetch_s)


@pytest.mark.parametrize(
    ("ahead", "reason", "ahead_s", "patience_s"),
    [
        # nothing goes first: as above, and the term says so
        ((Ahead(0.0, 5e7), Ahead(0.0, 5e7)), FetchReason.FASTER, 0.0, 1.0),
        # both ports drain at once: 0.2 s at the lender's, 0.4 s at the reader's; 0.1 + 0.4 + 1 = 1.5 s
        ((Ahead(1e7, 5e7), Ahead(2e7, 5e7)), FetchReason.FASTER, 0.4, 0.6),
        # the slower port counts, not the one with more bytes: 0.1 + 1 + 1 = 2.1 s
        ((Ahead(4e7, 1e8), Ahead(2e7, 2e7)), FetchReason.SLOWER, 1.0, 0.0),
        # 0.1 + 0.5 + 1 = 1.6 s, which 25 % more make 2 s
        ((Ahead(2.5e7, 5e7), Ahead(0.0, 5e7)), FetchReason.SLOWER, 0.5, 0.5),
    ],
)
def test_what_goes_before_the_fetch_at_its_ports_delays_it(
    ahead: tuple[Ahead, ...], reason: FetchReason, ahead_s: float, patience_s: float
) -> None:
    choice = choose(dataclasses.replace(HERE, ahead=ahead), FetchConfig())
    assert choice.reason is reason
    assert choice.fetch_s == pytest.approx(1.1 + ahead_s)
    assert choice.terms == pytest.approx({"lend_s": 0.1, "ahead_s": ahead_s, "move_s": 1.0, "tokens": 2000.0})
    assert choice.patience_s == pytest.approx(patience_s)


@pytest.mark.parametrize(
    ("change", "patience_s"),
    [
        # recompute 2 s less 1 s of moving: a lease that stands later has made the fetch slower
        ({}, 1.0),
        # 5e7 bytes move in 1.5 s
        ({"bytes_per_s": 1e8 / 3}, 0.5),
        # in time by computing if it begins within 0.4 s
        ({"slack_s": 0.4}, 0.4),
        ({"slack_s": 3.0}, 1.0),
        # in time only if nothing is waited for, or not at all: as long as the loan takes, and the margin, 0.1 * 1.25 s
        ({"slack_s": 0.01}, 0.125),
        ({"slack_s": -5.0}, 0.125),
        # nothing is saved, so nothing is waited for
        ({"compute_s_per_token": 0.0001}, 0.0),
    ],
)
def test_the_wait_for_a_loan_is_bounded_by_what_it_saves_and_by_the_objective(
    change: dict[str, Any], patience_s: float
) -> None:
    assert choose(dataclasses.replace(HERE, **change), FetchConfig()).patience_s == pytest.approx(patience_s)


@pytest.mark.parametrize(
    "change",
    [
        {"size": -1},
        {"lend_s": math.nan},
        {"bytes_per_s": 0.0},
        {"bytes_per_s": math.inf},
        {"slack_s": math.nan},
        {"ahead": (Ahead(math.nan, 1e7),)},
        {"ahead": (Ahead(1e7, 1e7), Ahead(-1.0, 1e7))},
        {"ahead": (Ahead(math.inf, 1e7),)},
        {"ahead": (Ahead(1e7, 0.0),)},
        {"ahead": (Ahead(1e7, math.nan),)},
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(BadEvent, match=next(iter(change))):
        choose(dataclasses.replace(HERE, **change), FetchConfig())


def test_the_configuration_is_checked() -> None:
    with pytest.raises(BadParameter, match="margin"):
        FetchConfig(margin=-0.1)
