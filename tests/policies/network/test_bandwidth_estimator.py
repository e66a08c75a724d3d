"""Tests that the estimator learns the known bandwidth of a link that own flows share, and that it forgets old data."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.network.bandwidth_estimator import MAX_CONGESTION, BandwidthEstimator, EstimatorConfig
from policies.network.oracle import Oracle

PAIR = ("n1", "n2")


class Link:
    """A link that its flows share evenly (processor sharing); it reports each transfer to an estimator."""

    def __init__(self, estimator: BandwidthEstimator, bytes_per_s: float, tier: int | None = 1) -> None:
        self.estimator, self.bytes_per_s, self.tier = estimator, bytes_per_s, tier
        self.now_s, self.left, self.begun = 0.0, {}, {}  # type: ignore[var-annotated]
        self.sizes: dict[str, int] = {}

    def begin(self, attempt_id: str, n_bytes: int) -> None:
        self.estimator.routed(attempt_id, "p", PAIR, self.tier, 0.0, self.now_s)
        self.left[attempt_id], self.sizes[attempt_id], self.begun[attempt_id] = (
            float(n_bytes),
            n_bytes,
            self.now_s,
        )

    def end_next(self) -> str:
        attempt_id = min(self.left, key=lambda r: (self.left[r], r))
        moved = self.left[attempt_id]
        self.now_s += moved * len(self.left) / self.bytes_per_s
        for other in self.left:
            self.left[other] -= moved
        del self.left[attempt_id]
        self.estimator.transferred(
            attempt_id, self.sizes[attempt_id], self.now_s - self.begun[attempt_id], self.now_s
        )
        return attempt_id

    def run(self, transfers: int, at_once: int, rng: random.Random) -> None:
        """Moves random transfers, at most `at_once` at a time. Up to 1e9 B/s each takes at least 10 us, because the
        estimator does not count a transfer shorter than `SECONDS[0]`.
        """
        begun = 0
        while begun < transfers or self.left:
            while begun < transfers and len(self.left) < rng.randint(1, at_once):
                self.begin(f"{self.now_s}-{begun}", rng.randint(10_000, 1_000_000))
                begun += 1
            if self.left:
                self.end_next()


def learned(estimator: BandwidthEstimator, now_s: float) -> float | None:
    estimate = estimator.pairs(now_s).get(PAIR)
    return estimate.bytes_per_s if estimate else None


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 16), st.floats(1e3, 1e9), st.integers(0, 2**32))
def test_a_bandwidth_is_recovered_whatever_number_of_own_flows_shares_it(
    at_once: int, bytes_per_s: float, seed: int
) -> None:
    estimator = BandwidthEstimator(EstimatorConfig(forget_after_s=1e9))
    link = Link(estimator, bytes_per_s)
    link.run(60, at_once, random.Random(seed))
    assert learned(estimator, link.now_s) == pytest.approx(bytes_per_s, rel=1e-3)


def test_two_overlapping_flows_by_hand() -> None:
    """The link has 100 B/s. a moves 300 B from 0 s on, b moves 100 B from 1 s on. a alone has moved 100 B at 1 s. Then
    both move 50 B/s until b ends at 3 s. a has 100 B left and ends at 4 s.

    a's share is 1 + 2/2 + 1 = 3 s for 300 B; b's share is 2/2 = 1 s for 100 B.
    """
    estimator = BandwidthEstimator(EstimatorConfig(min_samples=1))
    estimator.routed("a", "p", PAIR, 1, None, 0.0)
    estimator.routed("b", "p", PAIR, 1, None, 1.0)
    estimator.transferred("b", 100, 2.0, 3.0)
    # a has not ended, so it is not known yet how much of the link b had
    assert estimator.pairs(3.0) == {}
    estimator.transferred("a", 300, 4.0, 4.0)
    assert learned(estimator, 4.0) == pytest.approx(100.0)


def test_flows_over_several_links_share_less() -> None:
    """Two flows use two links of 100 B/s for 3 s. On average 1 + 1/2 flows are on a flow's link, so its share is
    3 / 1.5 = 2 s for 200 B. With a single link the share would be 1.5 s, and the estimate 133 B/s.
    """
    estimator = BandwidthEstimator(EstimatorConfig(min_samples=2))
    for attempt_id in ("a", "b"):
        estimator.routed(attempt_id, "p", PAIR, 2, None, 0.0, uplinks=2)
    for attempt_id in ("a", "b"):
        estimator.transferred(attempt_id, 200, 3.0, 3.0)
    assert learned(estimator, 3.0) == pytest.approx(100.0)


def test_a_flow_that_never_ends_does_not_hold_the_others_back_for_ever() -> None:
    estimator = BandwidthEstimator(EstimatorConfig(min_samples=1, settle_s=2.0))
    estimator.routed("lost", "p", PAIR, 1, None, 0.0)
    estimator.routed("a", "p", PAIR, 1, None, 0.0)
    estimator.transferred("a", 100, 1.0, 1.0)
    assert learned(estimator, 2.9) is None
    assert learned(estimator, 3.0) == pytest.approx(100.0)


def test_flows_of_other_senders_and_tiers_are_not_ours_to_divide_by() -> None:
    estimator = BandwidthEstimator(EstimatorConfig(min_samples=1))
    estimator.routed("a", "p", PAIR, 1, None, 0.0)
    estimator.routed("far", "p", ("n1", "n9"), 3, None, 0.0)
    estimator.routed("else", "q", PAIR, 1, None, 0.0)
    for attempt_id in ("far", "else", "a"):
        estimator.transferred(attempt_id, 100, 2.0, 2.0)
    found = estimator.pairs(2.0)
    assert found[PAIR].bytes_per_s == found["n1", "n9"].bytes_per_s == pytest.approx(50.0)


def test_without_tiers_the_flows_are_taken_as_one_each() -> None:
    estimator = BandwidthEstimator(EstimatorConfig(min_samples=2))
    for attempt_id in ("a", "b"):
        estimator.routed(attempt_id, "p", PAIR, None, None, 0.0)
    for attempt_id in ("a", "b"):
        estimator.transferred(attempt_id, 100, 2.0, 2.0)
    assert learned(estimator, 2.0) == pytest.approx(50.0)


def alone(estimator: BandwidthEstimator, i: int, n_bytes: int, seconds: float, **kw: float) -> None:
    estimator.routed(f"r{i}", "p", PAIR, 1, kw.pop("latency_s", 0.0), float(i))
    estimator.transferred(f"r{i}", n_bytes, seconds, i + seconds, **kw)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_fourfold_change_is_followed_within_seven_noisy_transfers(factor: float) -> None:
    rng = random.Random(7)
    followed = []
    for _ in range(50):
        estimator = BandwidthEstimator(EstimatorConfig(forget_after_s=1e6))
        for i in range(40):
            rate = 1000.0 * math.exp(rng.gauss(0.0, 0.3)) * (factor if i >= 20 else 1.0)
            alone(estimator, i, 1000, 1000 / rate)
            now = learned(estimator, i + 10.0)
            if i >= 20 and now is not None and abs(math.log(now / (1000 * factor))) < math.log(1.5):
                followed.append(i - 19)
                break
    assert len(followed) == 50
    assert sorted(followed)[47] <= 9  # all but two runs
    assert sorted(followed)[25] <= 7


def test_one_wild_transfer_moves_nothing_far() -> None:
    estimator = BandwidthEstimator(EstimatorConfig())
    for i, seconds in enumerate([1.0, 1.1, 0.9, 40.0, 1.0]):
        alone(estimator, i, 1000, seconds)
    assert learned(estimator, 50.0) == pytest.approx(1000)


@pytest.mark.parametrize(
    ("n_bytes", "seconds"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, 1e-35), (1, 1e30), (1, math.nan)]
)
def test_what_no_transfer_can_be_is_not_learned_from(n_bytes: int, seconds: float) -> None:
    estimator = BandwidthEstimator(EstimatorConfig(min_samples=1))
    alone(estimator, 1, n_bytes, seconds)
    assert estimator.pairs(2.0) == {}
    assert (estimator.transfers, estimator.unusable) == (0, 1)


def test_held_time_and_the_tiers_latency_do_not_count() -> None:
    estimator = BandwidthEstimator(EstimatorConfig(min_samples=1))
    alone(estimator, 0, 1000, 7.0, held_s=4.0, latency_s=1.0)
    assert learned(estimator, 7.0) == pytest.approx(1000 / 2.0)


def test_a_latency_nobody_gave_is_found_where_the_sizes_differ() -> None:
    """Every transfer takes 0.5 s + bytes / (1000 B/s)."""
    estimator = BandwidthEstimator(EstimatorConfig())
    for i, n_bytes in enumerate([200, 3000, 1000, 600, 5000, 400]):
        estimator.routed(f"r{i}", "p", PAIR, None, None, float(i))
        estimator.transferred(f"r{i}", n_bytes, 0.5 + n_bytes / 1000, float(i))
    estimate = estimator.pairs(6.0)[PAIR]
    assert estimate.latency_s == pytest.approx(0.5)
    # of the 0.7 s for 200 B at most half counts as latency; the median ignores this one transfer
    assert estimate.bytes_per_s == pytest.approx(1000, rel=0.01)


def test_equal_sizes_say_nothing_of_the_latency() -> None:
    estimator = BandwidthEstimator(EstimatorConfig())
    for i in range(5):
        estimator.routed(f"r{i}", "p", PAIR, None, None, float(i))
        estimator.transferred(f"r{i}", 1000, 1.5, float(i))
    estimate = estimator.pairs(6.0)[PAIR]
    assert estimate.latency_s is None
    assert estimate.bytes_per_s == pytest.approx(1000 / 1.5)


def test_cold_start_and_old_data() -> None:
    estimator = BandwidthEstimator(EstimatorConfig(min_samples=3, forget_after_s=60.0))
    alone(estimator, 0, 1000, 1.0)
    alone(estimator, 1, 1000, 1.0)
    assert learned(estimator, 2.0) is None
    alone(estimator, 2, 1000, 1.0)
    assert learned(estimator, 3.0) == pytest.approx(1000)
    # the first transfer is over 60 s old, so two are left
    assert learned(estimator, 61.5) is None
    assert estimator.pairs(100.0) == {}
    assert estimator._samples == {}


def test_pairs_that_give_no_sample_are_not_remembered() -> None:
    estimator = BandwidthEstimator(EstimatorConfig())
    for i in range(100):
        estimator.routed(f"r{i}", "p", ("n1", f"n{i}"), 1, 0.0, 0.0)
        estimator.dropped(f"r{i}")
    alone(estimator, 100, 1000, 1.0)
    assert estimator._tiers == {}
    assert estimator.pairs(1000.0) == {}
    assert (estimator._tiers, estimator._samples, estimator._links) == ({}, {}, {})


def test_congestion_is_what_the_tiers_pairs_fall_short_of_its_bandwidth() -> None:
    estimator = BandwidthEstimator(EstimatorConfig(min_samples=1))
    for i, (node, seconds) in enumerate([("a", 2.0), ("b", 4.0), ("c", 8.0)]):
        estimator.routed(f"r{i}", f"p{i}", ("n1", node), 2, 0.0, 0.0)
        estimator.transferred(f"r{i}", 1000, seconds, 8.0)
    pairs = estimator.pairs(8.0)
    assert estimator.by_tier(pairs) == {2: pytest.approx(250.0)}
    assert estimator.congestion(pairs, {2: 1000.0}) == {2: pytest.approx(0.75)}
    assert estimator.congestion(pairs, {2: 100.0}) == {2: 0.0}  # faster than the operator thinks
    assert estimator.congestion(pairs, {2: 1e9}) == {2: MAX_CONGESTION}
    assert estimator.congestion(pairs, {1: 1000.0}) == {}


@pytest.mark.parametrize(
    "bad", [{"min_samples": 0}, {"window": 2}, {"forget_after_s": 0.0}, {"settle_s": -1.0}]
)
def test_impossible_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="network estimator: allowed is"):
        EstimatorConfig(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("ended_s", [float("nan"), float("inf"), float("-inf")])
def test_a_transfer_that_ended_at_no_time_is_not_kept(ended_s: float) -> None:
    estimator = BandwidthEstimator(EstimatorConfig(min_samples=1))
    estimator.routed("r", "p", PAIR, 1, None, 0.0)
    estimator.transferred("r", 100, 1.0, ended_s)
    assert estimator.unusable == 1 and estimator.pairs(1e6) == {} and estimator._links == {}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["route", "end", "drop", "look"]),
        st.integers(0, 5),
        st.floats(0.0, 5.0),
        st.one_of(st.floats(), st.floats(0.0, 10.0)),
        st.integers(-5, 10_000),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.sampled_from([None, 1]), st.sampled_from([None, 0.0, 2.0]))
def test_whatever_is_reported_estimates_are_numbers_an_oracle_takes(steps, tier, latency_s) -> None:  # type: ignore[no-untyped-def]
    estimator, now_s = BandwidthEstimator(EstimatorConfig(min_samples=1)), 0.0
    for what, n, gap_s, seconds, n_bytes in steps:
        now_s += gap_s
        if what == "route":
            estimator.routed(f"r{n}", f"p{n % 2}", PAIR, tier, latency_s, now_s)
        elif what == "end":
            estimator.transferred(f"r{n}", n_bytes, seconds, now_s)
        elif what == "drop":
            estimator.dropped(f"r{n}")
        pairs = estimator.pairs(now_s)
        congestion = estimator.congestion(pairs, {1: 1e3})
        Oracle({1: 1e3}, pairs=pairs, congestion=congestion)  # it refuses what is no number above 0
    for n in range(6):
        estimator.dropped(f"r{n}")
    assert estimator.pairs(now_s + 1e3) == {}
    assert estimator._links == {}
    assert estimator._flows == {}
