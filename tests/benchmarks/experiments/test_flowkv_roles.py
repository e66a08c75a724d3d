"""FlowKV's role switch as an experiment: the shifting load, the engines, and what is compared."""

import pytest

from benchmarks.experiments import flowkv_roles as roles
from benchmarks.experiments import flowkv_roles_tuning as tuning
from benchmarks.experiments.base import Metrics, Results
from policies.routing.flowkv.regimes import RegimeThresholds
from policies.state.views import Role


def test_the_ratio_shifts_at_each_half_of_a_period() -> None:
    made = roles.work(120.0, 2, 0)
    assert [r.at_s for r in made] == sorted(r.at_s for r in made)
    long_prompts = [r for r in made if (r.at_s % 120.0) < 60.0]
    assert len(long_prompts) == pytest.approx(2 * 60 * 2.4, rel=0.15)
    assert len(made) - len(long_prompts) == pytest.approx(2 * 60 * 11, rel=0.1)
    assert min(r.prompt_tokens for r in long_prompts) > 1_500
    assert len({r.request_id for r in made}) == len(made)
    assert all((r.ttft_slo_s, r.tpot_slo_s) == (8.0, 0.08) for r in made)


def test_eight_engines_in_every_division() -> None:
    for prefill in roles.FIXED:
        first, second = roles.engines(prefill)
        assert (first.role, first.count, second.role) == (Role.PREFILL, prefill, Role.DECODE)
        assert first.count + second.count == 8


def test_the_best_of_each_kind_are_compared() -> None:
    """Fixed divisions take 10 s and more, the best loan 8 s: 20 % less. Goodput 4 against 5: 25 % more."""
    variants = {v.name: v.config for v in roles.variants(False)}
    runs = {}
    for name, c in variants.items():
        switched = c["switch_s"] > 0.0
        seconds = 7.0 + c["switch_s"] / 5.0 if switched else 6.0 + c["prefill"] * 4.0 / 3.0
        run = dict.fromkeys(roles.KEPT, seconds) | {
            "goodput_per_s": 5.0 - (c["switch_s"] - 5.0) / 100.0 if switched else 4.0,
            "slo_share": 0.5,
            "peak/role_switches": 9.0 if switched else None,
        }
        runs[name] = {0: run}
    rows = {row.name: row for row in roles.compare(Results("flowkv_roles", False, variants, runs))}
    quicker = rows["period 120 s: mean E2E of switch 5 s below 3P5D"]
    assert (quicker.ours, quicker.met) == (pytest.approx(20.0), True)
    more = rows["period 120 s: goodput of switch 5 s above 3P5D"]
    assert (more.ours, more.met) == (pytest.approx(25.0), True)
    assert rows["switch 10 s, period 120 s: switches ordered"].ours == 9.0
    assert "4P4D, period 120 s: switches ordered" not in rows


def test_the_search_on_other_seeds_names_its_best_point() -> None:
    assert len(tuning.points()) == 16
    assert roles.SEEDS[0] < tuning.FIRST_SEED
    assert roles.THRESHOLDS in tuning.points()
    variants = {v.name: v.config for v in tuning.variants(False)}
    for wanted in (roles.THRESHOLDS, tuning.points()[0]):
        runs: dict[str, dict[int, Metrics]] = {}
        for name, config in variants.items():
            best = RegimeThresholds(**config["thresholds"]) == wanted
            runs[name] = {0: dict.fromkeys(roles.KEPT, 1.0) | {"slo_share": 0.9 if best else 0.4}}
        rows = tuning.compare(Results("flowkv_roles_tuning", False, variants, runs))
        assert (rows[0].name, rows[0].ours) == ("the greatest share", pytest.approx(90.0))
        assert rows[0].met is (wanted == roles.THRESHOLDS)
