"""The bandwidth to which a slowdown is relative, and that a report which comes after the admission still counts."""

import dataclasses

import pytest

from policies.network.contention import FORMS, ContentionEstimator, Curve
from policies.network.oracle import Oracle, PairEstimate
from policies.network.own_transfers import OwnTransfers

ORACLE = Oracle({2: 1_000.0}, {2: 1.0})


def moved(own: OwnTransfers, oracle: Oracle, n: int = 8, seconds: float = 5.0) -> None:
    """Lets `n` transfers of 1,000 B be alone in flight, one after the other."""
    for i in range(n):
        own.began(f"r{i}", "p", "d", 2, oracle, 0.0)
        own.arrived(f"r{i}", 1_000, seconds, 0.0)


def level(own: OwnTransfers) -> float:
    return own.taught(ORACLE, 0.0).contention["own"][2].level


@pytest.mark.parametrize(
    ("facts", "slowdown"),
    [
        # (5 s - 1 s of latency) * 1,000 B/s / 1,000 B
        ({}, 4.0),
        # the operator's congestion is others' traffic: 500 B/s are left
        ({"congestion": {2: 0.5}, "congestion_at_s": 0.0}, 2.0),
        # what our own transfers have taught has their contention in it already
        ({"congestion": {2: 0.5}, "congestion_at_s": 0.0, "congestion_learnt": (2,)}, 4.0),
        ({"pairs": {("p", "d"): PairEstimate(250.0, 0.0)}}, 4.0),
    ],
)
def test_a_slowdown_is_relative_to_what_others_leave(facts: dict[str, object], slowdown: float) -> None:
    own = OwnTransfers(ContentionEstimator())
    moved(own, dataclasses.replace(ORACLE, **facts))  # type: ignore[arg-type]
    # eight transfers, and eight of the prior whose slowdown is 1
    assert level(own) == pytest.approx((8 * slowdown + 8) / 16)


def test_what_is_taught_is_the_oracle_with_the_curves() -> None:
    own = OwnTransfers(ContentionEstimator())
    assert own.taught(ORACLE, 0.0) == dataclasses.replace(ORACLE, contention={form: {} for form in FORMS})


@pytest.mark.parametrize(("tier", "oracle"), [(2, None), (None, ORACLE), (3, ORACLE)])
def test_nothing_is_learnt_of_a_path_that_is_not_known(tier: int | None, oracle: Oracle | None) -> None:
    own = OwnTransfers(ContentionEstimator())
    own.began("a", "p", "d", tier, oracle, 0.0)
    own.arrived("a", 1_000, 5.0, 0.0)
    assert own.taught(ORACLE, 0.0).contention["own"] == {}


def test_an_admitted_transfer_is_not_in_flight_and_its_report_counts() -> None:
    own = OwnTransfers(ContentionEstimator())
    own.began("a", "p", "d", 2, ORACLE, 0.0)
    own.stopped("a")
    moved(own, ORACLE, 1, 3.0)
    # its count is 0, so all of the excess of 1 is the level's: 1 / (8 + 1)
    assert own.taught(ORACLE, 0.0).contention["own"][2] == Curve(pytest.approx(1 + 1 / 9), (0.0,), 1)
    own.arrived("a", 1_000, 3.0, 0.0)
    assert level(own) == pytest.approx((2 * 2 + 8) / 10)
    for _ in range(2):
        own.stopped("a")
        own.dropped("a")
        own.arrived("a", 1_000, 9.0, 0.0)
    assert level(own) == pytest.approx((2 * 2 + 8) / 10)


def test_a_dropped_transfer_teaches_nothing() -> None:
    own = OwnTransfers(ContentionEstimator())
    for name, drop in (("a", (OwnTransfers.dropped,)), ("b", (OwnTransfers.stopped, OwnTransfers.dropped))):
        own.began(name, "p", "d", 2, ORACLE, 0.0)
        for what in drop:
            what(own, name)
        own.arrived(name, 1_000, 9.0, 0.0)
    assert own.taught(ORACLE, 0.0).contention["own"] == {}
