"""Drift by hand, on equal and on moved traffic, and as the live holder sees it."""

import numpy as np
import pytest

from predictors.drift import DriftWatch, ks_critical, ks_distance, psi
from predictors.live import LivePredictor
from predictors.protocol import Arrival, Outcome
from predictors.train import metadata_of

from .conftest import CONFIG, two_kinds


def test_psi_by_hand():
    """Halves of 100 against 75 and 25: with half a count added, shares .5 and .5 against 75.5/101 and
    25.5/101.
    """
    reference = np.array([0.0] * 50 + [10.0] * 50)
    recent = np.array([0.0] * 75 + [10.0] * 25)
    a, b = 75.5 / 101, 25.5 / 101
    assert psi(reference, recent, bins=2) == pytest.approx(
        (a - 0.5) * np.log(a / 0.5) + (b - 0.5) * np.log(b / 0.5)
    )
    assert psi(reference, reference) == pytest.approx(0.0)


def test_ks_by_hand():
    assert ks_distance(np.array([1.0, 2.0, 3.0, 4.0]), np.array([3.0, 4.0, 5.0, 6.0])) == pytest.approx(0.5)
    assert ks_critical(100, 100, 0.05) == pytest.approx(1.358 * np.sqrt(0.02), rel=1e-3)


def test_quiet_and_moved_lengths():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5, 1, 3_000).astype(int).tolist()
    quiet, moved = DriftWatch(lengths), DriftWatch(lengths)
    for n in rng.lognormal(5, 1, 1_000):
        quiet.length(int(n))
        moved.length(int(2 * n))
    assert not quiet.report().drifted
    assert moved.report().drifted
    assert "PSI" in moved.report().reasons[0]


def test_calibration_that_breaks_is_seen():
    rng = np.random.default_rng(0)
    good, bad = DriftWatch([1]), DriftWatch([1])
    for p in rng.random(2_000):
        good.resolved(p, rng.random() < p)
        bad.resolved(p, rng.random() < p**3)
    assert not good.report().drifted
    assert bad.report().reasons[0].startswith("calibration")


def test_little_data_says_nothing():
    watch = DriftWatch([1, 2, 3])
    watch.length(1_000)
    watch.resolved(1.0, False)
    report = watch.report()
    assert (report.psi, report.calibration_error, report.drifted) == (None, None, False)


def test_empty_input_is_refused():
    for call in (psi, ks_distance):
        with pytest.raises(ValueError, match="at least one"):
            call(np.zeros(0), np.ones(1))
    with pytest.raises(ValueError, match="fitted on"):
        DriftWatch([])


@pytest.mark.parametrize("factor", [1, 4])
def test_live_notices_longer_answers(fitted, traffic, factor):
    """The model's own traffic is quiet; answers four times as long are drift."""
    live = LivePredictor(sample_every=1)
    live.adopt(fitted, metadata_of(fitted.model, traffic[:700], "test", CONFIG, []))
    for o in two_kinds(600, seed=9):
        features = live.arrive(o.arrival)
        live.predict([features], np.array([20]), 48)
        live.observe(Outcome(o.arrival, factor * o.output_tokens, o.finish_s))
    report = live.drift()
    assert report.lengths == 600
    assert report.resolved == 600
    assert report.drifted == (factor == 4)


def test_live_memory_is_bounded(fitted, traffic):
    live = LivePredictor(sample_every=1)
    live.adopt(fitted, metadata_of(fitted.model, traffic[:700], "test", CONFIG, []))
    rows = [live.arrive(Arrival(f"x{i}", 0.0, 10)) for i in range(10_100)]
    live.predict(rows, np.zeros(len(rows), dtype=np.int64), 24)
    assert live.stats().samples_pending == 10_000
