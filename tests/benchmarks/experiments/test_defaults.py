"""The rule by which the defaults of the two stages are chosen, on invented runs."""

import pytest

from benchmarks.experiments import defaults
from benchmarks.experiments.base import Results
from policies.routing.registry import DECODE, PREFILL

SIMPLE = defaults.SIMPLE
OTHER = ("predicted_ttft", "composition")


def results(ttft_s: dict[tuple[str, str], dict[str, float]]) -> Results:
    """Every pair takes 1 s in every situation, but for the given pairs in the given situations."""
    variants = {v.name: v.config for v in defaults.variants(True)}
    runs = {
        name: {
            0: {
                "ttft_mean_s": ttft_s.get((c["prefill"], c["policy"]), {}).get(c["situation"], 1.0),
                "jct_mean_s": 10.0,
            }
        }
        for name, c in variants.items()
    }
    return Results("defaults", True, variants, runs)


def test_a_regret_is_against_the_best_pair_of_the_cell() -> None:
    rows = {
        row.name: row for row in defaults.compare(results({SIMPLE: {"racks": 1.5}, OTHER: {"racks": 0.8}}))
    }
    simple = rows[" + ".join(SIMPLE) + ": largest regret"]
    # 1.5 s against 0.8 s
    assert simple.ours == pytest.approx(87.5) and simple.note.startswith("in racks at load 0.9")
    assert rows[" + ".join(OTHER) + ": largest regret"].ours == 0.0
    assert rows["racks, load 0.9: " + " + ".join(OTHER) + ": mean TTFT"].ours == 0.8


def test_the_pair_of_least_largest_regret_is_the_default_unless_the_simple_one_is_close() -> None:
    largest = dict.fromkeys(((p, d) for p in defaults.PREFILL for d in defaults.DECODE), 50.0)
    assert defaults.choice({**largest, OTHER: 4.0, SIMPLE: 10.0}) == OTHER
    assert defaults.choice({**largest, OTHER: 4.0, SIMPLE: 9.0}) == SIMPLE
    (chosen,) = [
        row.name for row in defaults.compare(results({OTHER: {"racks": 0.5}})) if "the default" in row.note
    ]
    assert chosen == " + ".join(OTHER) + ": largest regret"


def test_the_policies_exist_and_no_parameter_is_tuned() -> None:
    assert set(defaults.PREFILL) <= set(PREFILL) and set(defaults.DECODE) <= set(DECODE)
    assert all(v.config["params"] == {} for v in defaults.variants(False))


def test_requests_come_at_the_load_that_the_cluster_carries() -> None:
    config = next(v.config for v in defaults.variants(False) if v.config["situation"] == "one node")
    work = defaults._chat(config, 1)
    # 0.5 of 2 engines / (2,000 tokens x 64.3 us) = 7.8 requests a second, or less if decode is tighter
    assert 0.5 * 150 < len(work) <= 1.15 * 7.8 * 150
    assert sum(r.prompt_tokens for r in work) / len(work) == pytest.approx(2_000, rel=0.1)
