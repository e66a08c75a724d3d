"""The load of the overload benchmark: its rate, classes, tenants and lengths."""

import pytest

from benchmarks.overload.load import CLASSES, GREEDY, WEIGHTS, Mix, Times, works

MIX = Mix(prompt_tokens=50.0, output_tokens=20.0, longest_prompt=300, longest_output=100)


def test_the_load_has_its_rate_its_classes_and_its_lengths() -> None:
    made = works(MIX, 2.0, 5.0, 400.0, 1)
    assert len(made) == pytest.approx(2.0 * 5.0 * 400.0, rel=0.05)
    assert [one.at_s for one in made] == sorted(one.at_s for one in made)
    shares = [sum(one.request_class == name for one in made) / len(made) for name in CLASSES]
    assert shares == pytest.approx([0.5, 0.4, 0.1], abs=0.03)
    assert sum(one.prompt_tokens for one in made) / len(made) == pytest.approx(50.0, rel=0.05)
    assert sum(one.output_tokens for one in made) / len(made) == pytest.approx(20.0, rel=0.06)
    assert max(one.output_tokens for one in made) <= 100


def test_three_tenants_offer_half_of_their_share_of_the_capacity_and_the_greedy_one_the_rest() -> None:
    # of twice the capacity: half of 1/5, 1/5 and 2/5 of it are 0.05, 0.05 and 0.1 of the load
    made = works(MIX, 2.0, 5.0, 600.0, 1)
    shares = {name: sum(one.tenant == name for one in made) / len(made) for name in WEIGHTS}
    assert shares == pytest.approx({"ant": 0.05, "bee": 0.05, "cat": 0.1, "ox": 0.8}, abs=0.015)
    assert GREEDY == "ox"


def test_a_prompt_has_as_many_words_as_it_says_and_a_beginning_of_its_own() -> None:
    made = works(MIX, 1.0, 5.0, 20.0, 1)
    assert all(len(one.text.split()) == one.prompt_tokens for one in made)
    assert len({one.text.split()[0] for one in made}) == len(made)
    assert made == works(MIX, 1.0, 5.0, 20.0, 1) != works(MIX, 1.0, 5.0, 20.0, 2)


def test_answers_have_time_until_the_last_objective_ends() -> None:
    # what came at the end of the window has 30 s, or as long as requests are sent
    times = Times(ramp_s=15.0, window_s=50.0, after_s=5.0)
    assert (times.until_s, times.sending_s, times.cut_s) == (65.0, 70.0, 95.0)
    assert Times(1.0, 1.0, 3.0, patience_s=2.0).cut_s == 5.0
    assert [times.holds(at_s) for at_s in (14.9, 15.0, 64.9, 65.0)] == [False, True, True, False]
