"""Refits from the log: promoted only when better, never in the way of the model in use."""

import multiprocessing
from dataclasses import replace

import pytest

from predictors.evaluate import Evaluation, Scores, TotalScores
from predictors.outcomes import OutcomeLog
from predictors.promote import Decision, PromotionRules, RefitJob, decide, refit
from predictors.store import load_current, read_pointer

from .conftest import CONFIG, two_kinds


def evaluation(brier, mae=10.0, ece=0.01):
    scores = Scores(1_000, 0.3, 0.8, brier, ece, mae, ())
    total = TotalScores(0, None, None, ())
    return Evaluation("x", scores, {}, {}, total, total)


@pytest.mark.parametrize(
    ("old", "new", "promote", "reason"),
    [
        (evaluation(0.10), evaluation(0.09), True, "0.09000 against 0.10000"),
        (evaluation(0.10), evaluation(0.0999), False, "not better"),
        (evaluation(0.10), evaluation(0.11), False, "not better"),
        (evaluation(0.10), evaluation(0.09, mae=10.2), False, "conditional MAE"),
        (evaluation(0.10), evaluation(0.09, mae=10.1), True, ""),
        (evaluation(0.10), evaluation(0.09, ece=0.03), False, "calibration"),
        (evaluation(0.10, ece=0.04), evaluation(0.09, ece=0.03), True, ""),  # the old one is worse still
        (evaluation(None), evaluation(0.09), False, "no age point"),
    ],
)
def test_decision(old, new, promote, reason):
    made = decide(PromotionRules(), 500, old, new)
    assert made.promote == promote
    assert reason in made.reason


def test_too_little_held_out_never_promotes():
    assert decide(PromotionRules(), 99, evaluation(0.1), evaluation(0.01)) == Decision(
        False, "99 held-out requests are too few to judge by"
    )


def write(folder, outcomes):
    with OutcomeLog(folder) as log:
        for o in outcomes:
            log.append(o)


def job(tmp_path, **changes):
    return replace(
        RefitJob(tmp_path / "log", tmp_path / "models", CONFIG, niceness=0, newest_requests=5_000), **changes
    )


def test_first_model_then_nothing_better(tmp_path):
    """The template tells the length, and two_kinds' prompts have no key, so memorised survival by template is
    good; rules that ask for nothing promote the first, and the same data again brings no second.
    """
    write(tmp_path / "log", two_kinds(900, seed=1))
    easy = PromotionRules(min_brier_gain=-1.0, max_mae_loss=1.0, max_ece=1.0)
    first = refit(job(tmp_path, rules=easy))
    assert first.promoted
    assert (first.requests, first.damaged_lines) == (900, 0)
    assert read_pointer(tmp_path / "models").current == first.version
    again = refit(job(tmp_path))
    assert not again.promoted
    assert "not better" in again.reason
    assert read_pointer(tmp_path / "models").current == first.version
    assert load_current(tmp_path / "models") is not None


def test_it_runs_in_another_process(tmp_path):
    write(tmp_path / "log", two_kinds(100, seed=1))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        made = pool.apply(refit, (job(tmp_path, niceness=5),))
    assert made.version is None
    assert "too few" in made.reason


def test_no_data_is_an_answer_not_a_crash(tmp_path):
    write(tmp_path / "log", [])
    assert refit(job(tmp_path)).reason.startswith("0 outcomes")
    with pytest.raises(FileNotFoundError):
        refit(job(tmp_path, log_folder=tmp_path / "none"))
