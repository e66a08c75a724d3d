"""The learned realisation: it finds a known answer, is calibrated, knows when it knows nothing, and says what
it cannot do.
"""

import numpy as np
import pytest

from predictors.boost import confirmed
from predictors.calibration import Calibration, choose_calibration, log_loss, logit, sigmoid
from predictors.features import replay
from predictors.lgbm_fit import fit_lgbm, training_rows, usable_features
from predictors.protocol import Arrival, FinishReason, NotEnoughData, Outcome, WindowNotCovered

from .conftest import CONFIG, two_kinds


def of_template(traffic, features, name):
    return [f for o, f in zip(traffic[700:], features[700:], strict=True) if o.arrival.template_key == name]


def test_it_learns_what_the_template_says(fitted, traffic, traffic_features):
    """Short requests (20-60 tokens) at age 40 all end within 24; long ones (300-500) do not."""
    for name, low, high in (("short", 0.9, 1.0), ("long", 0.0, 0.1)):
        rows = of_template(traffic, traffic_features, name)
        made = fitted.predict(rows, np.full(len(rows), 40), 24, with_total=True)
        assert low <= made.p_finish.mean() <= high
        assert made.valid.all()
    short, long = (of_template(traffic, traffic_features, n)[:20] for n in ("short", "long"))
    totals = [fitted.predict(r, np.zeros(20, dtype=np.int64), 8, True).total for r in (short, long)]
    assert totals[0].mean_tokens.mean() == pytest.approx(40, abs=15)
    assert totals[1].mean_tokens.mean() == pytest.approx(400, abs=60)
    assert (np.diff(totals[1].quantiles_tokens, axis=1) >= 0).all()


def test_mean_remaining_is_that_of_the_group(fitted, traffic, traffic_features):
    """A short request is uniform on 20-60: at age 40, of those that end within 10, the mean is 5.5."""
    rows = of_template(traffic, traffic_features, "short")
    made = fitted.predict(rows, np.full(len(rows), 40), 10)
    assert made.mean_remaining_tokens.mean() == pytest.approx(5.5, abs=1.0)


def test_it_is_calibrated_on_a_known_answer(fitted, traffic, traffic_features):
    """P(T <= 44 | T > 20, short) = 24 / 40 for T uniform on 20-60."""
    rows = of_template(traffic, traffic_features, "short")
    assert fitted.predict(rows, np.full(len(rows), 20), 24).p_finish.mean() == pytest.approx(0.6, abs=0.08)


def test_without_signal_it_is_survival():
    traffic = two_kinds(700, seed=4, informative=False)
    model = fit_lgbm(traffic, replay(traffic), CONFIG).model
    assert model.design.ladder == ()
    assert model.classifier is None
    # and survival's mean of the total with it
    assert model.quantiles == (None, None, None)
    assert model.mean_weights == (0.0, 0.0, 0.0, 1.0)


def test_a_fit_repeats(fitted, traffic, traffic_features):
    again = fit_lgbm(traffic[:700], traffic_features[:700], CONFIG)
    ages = np.arange(200) * 2
    rows = traffic_features[700:]
    assert np.array_equal(fitted.predict(rows, ages, 24).p_finish, again.predict(rows, ages, 24).p_finish)


@pytest.mark.parametrize("window", [0, 97])
def test_other_windows_are_refused(fitted, traffic_features, window):
    with pytest.raises(WindowNotCovered, match=r"covers windows 1\.\.96"):
        fitted.predict(traffic_features[:1], np.array([0]), window)


def test_max_tokens_decides(fitted, traffic_features):
    from dataclasses import replace

    one = traffic_features[-1]
    capped = replace(one, arrival=replace(one.arrival, max_tokens=30))
    made = fitted.predict([capped], np.array([20]), 24, with_total=True)
    assert made.p_finish[0] == 1.0
    assert 1.0 <= made.mean_remaining_tokens[0] <= 10.0
    assert made.total.quantiles_tokens.max() <= 30.0


def test_an_empty_batch(fitted):
    made = fitted.predict([], np.zeros(0, dtype=np.int64), 24, with_total=True)
    assert made.p_finish.shape == (0,)


def outcomes_of(lengths, reason=FinishReason.STOP):
    return [
        Outcome(Arrival(f"r{i}", float(i), 10 + i % 7), n, i + 0.5, reason) for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("lengths", "reason", "message"),
    [
        ([], FinishReason.STOP, "too few"),
        ([10] * 499, FinishReason.STOP, "too few"),
        ([10] * 600, FinishReason.CANCELLED, "too few"),
        ([0] * 600, FinishReason.STOP, "too few"),
        ([1] * 600, FinishReason.STOP, "nothing to learn"),
    ],
)
def test_hopeless_data_is_refused(lengths, reason, message):
    outcomes = outcomes_of(lengths, reason)
    with pytest.raises(NotEnoughData, match=message):
        fit_lgbm(outcomes, replay(outcomes), CONFIG)


def test_constant_lengths_are_learned_as_such():
    outcomes = outcomes_of([40] * 600)
    features = replay(outcomes)
    made = fit_lgbm(outcomes, features, CONFIG).predict(features[-2:], np.array([0, 30]), 24)
    assert made.p_finish == pytest.approx([0.0, 1.0], abs=0.02)
    assert made.mean_remaining_tokens[1] == pytest.approx(10.0, abs=0.5)


def test_time_of_day_needs_days_and_constant_columns_are_left_out():
    hour = [
        Outcome(Arrival(f"r{i}", float(i), 5, max_tokens=9, wall_clock_s=float(i)), i % 9 + 1, i + 0.5)
        for i in range(600)
    ]
    names = usable_features(np.stack([f.values for f in replay(hour)]), hour)
    assert not {"time_of_day_sin", "prompt_tokens", "max_tokens", "global_count"} & set(names)
    assert "global_last" in names
    days = [
        Outcome(
            Arrival(
                o.arrival.request_id, o.arrival.arrival_s * 600, 5, wall_clock_s=o.arrival.arrival_s * 600
            ),
            3,
            1e9,
        )
        for o in hour
    ]
    assert "time_of_day_sin" in usable_features(np.stack([f.values for f in replay(days)]), days)


def test_short_outputs_are_walked_more_finely():
    outcomes = outcomes_of([20] * 600)
    assert set(training_rows(outcomes, CONFIG).ages.tolist()) == {0, 4, 8, 12, 16}


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([[1.0, 0.9, 0.8], [1.0, 0.9, 0.95]], 2),  # means 0.9 and 0.875
        # best on the mean is 2, but block 1 disagrees
        ([[1.0, 0.5, 0.2], [1.0, 0.9, 1.1]], 0),
        ([[1.0, 0.9999, 1.0], [1.0, 0.9999, 1.0]], 0),  # gain below 0.2 %
        ([[1.0, 1.1, 1.2], [1.0, 1.1, 1.2]], 0),
    ],
)
def test_trees_must_be_confirmed_by_every_block(losses, expected):
    assert confirmed(np.array(losses), np.array([10, 10]), 0.002) == expected


def miscalibrated(power, n=20_000):
    rng = np.random.default_rng(0)
    z = rng.normal(0, 2, n)
    label = rng.random(n) < sigmoid(power * z)
    return z, np.full(n, 24), label, np.arange(n) * 4 // n


def test_good_odds_are_left_alone():
    assert choose_calibration(*miscalibrated(1.0), 0.01).kind == "identity"


@pytest.mark.parametrize("power", [0.4, 2.5])
def test_wrong_odds_are_put_right(power):
    """True log odds are 0.4 or 2.5 times those given."""
    z, windows, label, block = miscalibrated(power)
    chosen = choose_calibration(z, windows, label, block, 0.01)
    assert chosen.kind in ("platt", "isotonic")
    assert np.abs(chosen.apply(z, windows) - sigmoid(power * z)).mean() < 0.02
    assert log_loss(chosen.apply(z, windows), label) < log_loss(sigmoid(z), label)


def test_log_odds_round_trip():
    p = np.array([0.001, 0.3, 0.999])
    assert sigmoid(logit(p)) == pytest.approx(p)
    assert Calibration("isotonic", (0.0, 1.0), (0.2, 0.6)).apply(np.zeros(1), np.ones(1, dtype=np.int64))[
        0
    ] == pytest.approx(0.4)
