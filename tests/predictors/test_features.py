"""Features are causal, absent where the source is silent, and bounded in memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictors.features import FEATURE_NAMES, SKETCH_SCOPES, FeatureTracker, replay, sketch_names, stack
from predictors.protocol import Arrival, FinishReason, Outcome, Sampling, TextSignals

from .conftest import two_kinds


def value(features, name):
    return float(features.values[FEATURE_NAMES.index(name)])


def outcome(i, tokens, arrival_s=None, finish_s=None, reason=FinishReason.STOP, **facts):
    at_s = float(i) if arrival_s is None else arrival_s
    return Outcome(
        Arrival(f"r{i}", at_s, 10, **facts), tokens, at_s + 0.5 if finish_s is None else finish_s, reason
    )


def test_the_future_does_not_matter():
    """Lengths of everything that ends after request 150 arrived are shuffled, later arrivals changed: its
    features, and all before it, stay the same to the bit."""
    outcomes = two_kinds(300, seed=1)
    now_s = outcomes[150].arrival.arrival_s
    rng = np.random.default_rng(0)
    later = [i for i, o in enumerate(outcomes) if o.finish_s >= now_s]
    shuffled = dict(
        zip(later, rng.permutation([outcomes[i].output_tokens for i in later]).tolist(), strict=True)
    )
    changed = [
        Outcome(
            o.arrival
            if i <= 150
            else Arrival(o.arrival.request_id, o.arrival.arrival_s, 7, template_key="new"),
            shuffled.get(i, o.output_tokens),
            o.finish_s,
        )
        for i, o in enumerate(outcomes)
    ]
    before, after = stack(replay(outcomes)), stack(replay(changed))
    assert np.array_equal(before[:151], after[:151], equal_nan=True)
    assert not np.array_equal(before[151:], after[151:], equal_nan=True)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 39), st.integers(1, 10_000))
def test_a_request_does_not_see_its_own_output(index, tokens):
    outcomes = two_kinds(40, seed=5)
    other = list(outcomes)
    o = other[index]
    other[index] = Outcome(o.arrival, tokens, o.finish_s)
    assert np.array_equal(
        stack(replay(outcomes))[: index + 1], stack(replay(other))[: index + 1], equal_nan=True
    )


def test_a_finish_at_the_instant_of_an_arrival_comes_after_it():
    first, second = outcome(0, 50, finish_s=5.0), outcome(1, 60, arrival_s=5.0)
    assert np.isnan(value(replay([first, second])[1], "global_last"))


def test_what_the_source_lacks_is_absent():
    made = FeatureTracker().arrive(Arrival("r", 0.0, 10))
    absent = {n for n in FEATURE_NAMES if np.isnan(value(made, n))}
    assert value(made, "prompt_tokens") == 10.0
    assert {
        "max_tokens",
        "temperature",
        "turn",
        "text_chars",
        "time_of_day_sin",
        "client_ewma",
        "session_gap_s",
    } <= absent


def test_what_the_source_has_is_taken_over():
    arrival = Arrival(
        "r",
        0.0,
        10,
        max_tokens=99,
        sampling=Sampling(0.7, 0.9, 40, 2, 3, True),
        turn=4,
        wall_clock_s=86_400.0 / 4,
        text=TextSignals(11, 12, 1, 2, 3, 500),
    )
    made = FeatureTracker().arrive(arrival)
    expected = {
        "max_tokens": 99,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "stop_strings": 2,
        "choices": 3,
        "structured_output": 1,
        "turn": 4,
        "time_of_day_sin": 1.0,
        "time_of_day_cos": 0.0,
        "text_chars": 11,
        "text_last_turn_chars": 12,
        "text_question_marks": 1,
        "text_code_marks": 2,
        "text_list_marks": 3,
        "text_requested_words": 500,
    }
    assert {n: value(made, n) for n in expected} == pytest.approx(expected, abs=1e-6)


def test_statistics_of_a_group_by_hand():
    """Client a finished 10, 20, 60: the mean while few, the last, the median; client b nothing."""
    tracker = FeatureTracker()
    for i, tokens in enumerate((10, 20, 60)):
        tracker.finish(outcome(i, tokens, client="a"))
    tracker.finish(outcome(3, 999, reason=FinishReason.CANCELLED, client="a"))
    made = tracker.arrive(Arrival("r", 9.0, 10, client="a"))
    assert [value(made, f"client_{s}") for s in ("count", "last", "ewma", "p10", "p50", "p90")] == [
        3,
        60,
        30,
        10,
        20,
        60,
    ]
    assert value(made, "client_weight") == 3.0
    assert [value(made, n) for n in sketch_names("client")][::8] == [10, 20, 60]
    assert np.isnan(value(tracker.arrive(Arrival("s", 9.0, 10, client="b")), "client_ewma"))


def test_sessions_and_rates():
    tracker = FeatureTracker()
    for at_s in (0.0, 1.0, 55.0):
        tracker.arrive(Arrival(f"r{at_s}", at_s, 100, session="s"))
    made = tracker.arrive(Arrival("x", 60.0, 140, session="s"))
    assert value(made, "session_gap_s") == 5.0
    assert value(made, "session_prompt_growth_tokens") == 40.0
    assert value(made, "arrival_rate_10s") == pytest.approx(1 / 10)
    assert value(made, "arrival_rate_60s") == pytest.approx(2 / 60)  # the one at 0.0 is just out


def test_memory_is_bounded():
    tracker = FeatureTracker(keys_per_scope=5)
    for i in range(400):
        arrival = Arrival(
            f"r{i}", float(i), i, client=f"c{i}", session=f"s{i}", prompt_key=f"p{i}", template_key=f"t{i}"
        )
        tracker.arrive(arrival)
        tracker.finish(Outcome(arrival, 10, float(i)))
    assert tracker.keys_held() <= 5 * 9
    assert np.isnan(value(tracker.arrive(Arrival("x", 500.0, 1, client="c0")), "client_ewma"))
    assert value(tracker.arrive(Arrival("y", 500.0, 1, client="c399")), "client_ewma") == 10.0


def test_names_are_unique_and_empty_batches_stack():
    assert len(set(FEATURE_NAMES)) == len(FEATURE_NAMES)
    assert {f"{s}_weight" for s in SKETCH_SCOPES} <= set(FEATURE_NAMES)
    assert stack([]).shape == (0, len(FEATURE_NAMES))
