"""The dial's answers have the AUC that it is set to, and the judge counts what was answered, by hand."""

import numpy as np
import pytest

from benchmarks.experiments.forecast_dial import Dial, Judge, Past
from predictors import metrics
from predictors.features import FeatureTracker
from predictors.oracle import Oracle
from predictors.protocol import ANY_WINDOW, Arrival, Features, Outcome, Prediction
from predictors.samples import walk

H = 48


def features(count: int) -> list[Features]:
    tracker = FeatureTracker()
    return [tracker.arrive(Arrival(f"r{i}", float(i), 10)) for i in range(count)]


def past(lengths: list[int]) -> Past:
    return Past.of([Outcome(Arrival(f"p{i}", 0.0, 10), n, 1.0) for i, n in enumerate(lengths)])


def lengths(count: int) -> dict[str, int]:
    drawn = np.random.default_rng(0).integers(1, 400, size=count)
    return {f"r{i}": int(n) for i, n in enumerate(drawn)}


def test_the_past_by_hand() -> None:
    """A request of 40 tokens has 40, 24 and 8 to come at ages 0, 16 and 32, one of 16 has 16: within 20 lie 8 and 16.
    q = (2 + 1/2) / (4 + 1), mean 12, deviation 4.
    """
    assert past([40, 16]).window(20) == pytest.approx((0.5, 12.0, 4.0))
    # nothing ends within 4 tokens: half of a row, and the middle of the window
    assert past([40, 16]).window(4) == pytest.approx((0.1, 2.0, 0.0))


@pytest.mark.parametrize("auc", [0.5, 0.7, 0.9, 0.97])
def test_the_area_is_that_of_the_dial_and_the_probabilities_are_calibrated(auc: float) -> None:
    known, asked = lengths(2_000), features(2_000)
    outcomes = [Outcome(f.arrival, known[f.arrival.request_id], 1.0) for f in asked]
    rows = walk(outcomes, 16, 8_000, seed=1)
    dial = Dial(known, Past.of(outcomes), auc, seed=1)
    made = dial.predict([asked[i] for i in rows.request], rows.ages, H)
    ends = rows.finishes(H)
    # 2,000 independent errors leave a deviation of about 0.01 of an area of 0.7.
    assert metrics.roc_auc(made.p_finish, ends) == pytest.approx(auc, abs=0.03)
    assert made.p_finish.mean() == pytest.approx(ends.mean(), abs=0.02)
    likely = made.p_finish >= 0.5
    if likely.any():
        assert ends[likely].mean() == pytest.approx(made.p_finish[likely].mean(), abs=0.05)
    assert made.valid.all()
    assert made.mean_remaining_tokens.min() >= 1.0 and made.mean_remaining_tokens.max() <= H


def test_better_dials_err_less_and_the_best_is_the_oracle() -> None:
    known, asked = lengths(2_000), features(2_000)
    true = np.array(list(known.values()))
    ages, errors = true // 2, []
    for auc in (0.5, 0.8, 0.95, 1.0):
        made = Dial(known, past(true.tolist()), auc, 1).predict(asked, ages, H, with_total=True)
        assert made.total is not None
        mae = metrics.conditional_mae(made.mean_remaining_tokens, true - ages, true - ages <= H)
        errors.append((mae, float(np.abs(np.log(made.total.mean_tokens / true)).mean())))
    assert errors == sorted(errors, reverse=True)
    oracle = Oracle(known).predict(asked, ages, H, with_total=True)
    assert oracle.total is not None
    assert (made.p_finish == oracle.p_finish).all() and errors[-1] == (0.0, 0.0)
    assert (made.total.quantiles_tokens == oracle.total.quantiles_tokens).all()


def test_at_one_half_every_request_gets_the_base_rate() -> None:
    known, asked = lengths(50), features(50)
    general = past(list(known.values()))
    made = Dial(known, general, 0.5, 1).predict(asked, np.zeros(50, np.int64), H)
    share, mean, _ = general.window(H)
    assert made.p_finish == pytest.approx(share)
    assert made.mean_remaining_tokens == pytest.approx(mean)


def test_a_request_is_misjudged_in_the_same_way_again_and_by_another_seed_in_another() -> None:
    known, asked = dict.fromkeys(lengths(50), 300), features(50)
    dials = [Dial(known, past([300]), 0.8, seed) for seed in (1, 1, 2)]
    first, again, other = (dial.predict(asked, np.full(50, 10), H).p_finish for dial in dials)
    later = dials[0].predict(asked, np.full(50, 100), H).p_finish
    assert (first == again).all() and (first == later).all() and not (first == other).any()


@pytest.mark.parametrize("auc", [0.4, 1.1, float("nan")])
def test_an_area_that_no_forecast_has_is_refused(auc: float) -> None:
    with pytest.raises(ValueError, match="AUC"):
        Dial({}, past([1]), auc, 0)
    with pytest.raises(ValueError, match="no requests"):
        Past.of([])


class Fixed:
    """A predictor whose answers are given."""

    name, windows = "fixed", ANY_WINDOW

    def __init__(self, p: list[float], mu: list[float]) -> None:
        self.p, self.mu = np.array(p), np.array(mu)
        self.seen: list[Outcome] = []

    def observe(self, outcome: Outcome) -> None:
        self.seen.append(outcome)

    def predict(self, features, ages, window_tokens, with_total=False):  # type: ignore[no-untyped-def]
        return Prediction(self.p, self.mu, np.ones(len(self.p), dtype=bool))


def test_the_judge_by_hand() -> None:
    """Left are 10, 40, 100 and 0 of a window of 48; the last is not counted. Of the pairs of an end and a stay, (0.9,
    0.5) is in order and (0.3, 0.5) is not: 1/2. MAE: |12 - 10| and |30 - 40| are 6 in the mean. Brier: (0.01 + 0.49 +
    0.25) / 3. Two of three pass the gate, one of them rightly.
    """
    known = {"r0": 20, "r1": 50, "r2": 110, "r3": 10}
    judge = Judge(Fixed([0.9, 0.3, 0.5, 0.0], [12.0, 30.0, 20.0, 1.0]), known)
    made = judge.predict(features(4), np.full(4, 10), H)
    assert made.p_finish.tolist() == [0.9, 0.3, 0.5, 0.0]
    # An answer at arrival is not counted.
    judge.predict(features(4), np.zeros(4, np.int64), H, with_total=True)
    assert judge.scores(0.5) == pytest.approx(
        {
            "auc": 0.5,
            "brier": 0.25,
            "mae_tokens": 6.0,
            "refreshes": 3.0,
            "gate_share": 2 / 3,
            "gate_right": 0.5,
        }
    )
    # r0 and r1 arrived at 0 and 1 s: of the other two only r2 is counted, which stays.
    late = Judge(Fixed([0.9, 0.3, 0.5, 0.0], [12.0, 30.0, 20.0, 1.0]), known, since_s=2.0)
    late.predict(features(4), np.full(4, 10), H)
    assert late.scores(0.5) == pytest.approx(
        {
            "auc": None,
            "brier": 0.25,
            "mae_tokens": None,
            "refreshes": 1.0,
            "gate_share": 1.0,
            "gate_right": 0.0,
        }
    )
    outcome = Outcome(Arrival("r0", 0.0, 10), 20, 1.0)
    judge.observe(outcome)
    assert judge._judged.seen == [outcome]  # type: ignore[attr-defined]


def test_a_judge_that_was_not_asked_has_no_scores() -> None:
    scores = Judge(Fixed([], []), {}).scores(0.5)
    assert scores.pop("refreshes") == 0.0 and set(scores.values()) == {None}
