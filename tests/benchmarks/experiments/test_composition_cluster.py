"""The composition's cluster: what it carries, by hand; lengths do not depend on the load."""

import pytest

from benchmarks.experiments import composition, composition_cluster
from benchmarks.experiments.base import Results

CELL = {
    "gpus": 64,
    "context_tokens": 9_000,
    "oversubscription": 4.0,
    "tail": "light",
    "barrier": True,
    "load": 0.6,
    "warmup_s": 2.0,
    "measure_s": 6.0,
    "policy": "composition",
    "params": dict(composition.POLICIES["composition"][1]),
    "forecasts": "oracle",
}


def test_the_tightest_resource_sets_the_rate() -> None:
    # decode: 96 slots / (1200 tokens x (12.37 + 8 x 0.115 ms + 8 x 9600 x 40.75 ns = 16.42 ms)) = 4.87/s, below
    # prefill's 4 / (9000 x 64.3 us) = 6.91/s and the uplinks' 4 x 6.25 GB/s / 2.95 GB = 8.48/s
    assert composition_cluster.capacity_per_s(CELL) == pytest.approx(4.87, rel=2e-3)
    # at 20,000 tokens prefill is: 4 / (20000 x 64.3 us) = 3.11/s
    assert composition_cluster.capacity_per_s({**CELL, "context_tokens": 20_000}) == pytest.approx(
        3.11, rel=2e-3
    )


def test_another_load_keeps_the_lengths() -> None:
    low, high = (composition_cluster.workload({**CELL, "load": load}, 1) for load in (0.3, 0.6))
    assert [(r.prompt_tokens, r.output_tokens) for r in low] == [
        (r.prompt_tokens, r.output_tokens) for r in high[: len(low)]
    ]
    assert len(high) > len(low) > 3


def test_a_run_gives_the_same_numbers_again() -> None:
    first = composition.run_one(CELL, 3)
    assert first == composition.run_one(CELL, 3)
    assert first["requests"]
    assert first["unfinished"] == first["rejected"] == 0
    assert first != composition.run_one(CELL, 4)


def results(ttft_s: dict[str, float], rate: dict[str, float]) -> Results:
    variants = {v.name: v.config for v in composition.variants(True) if v.config["load"] == 0.6}
    runs = {
        name: {
            seed: {"ttft_mean_s": ttft_s.get(c["label"], 2.0), "throughput_tok_s": rate.get(c["label"], 90.0)}
            for seed in (0, 1)
        }
        for name, c in variants.items()
    }
    return Results("composition", True, variants, runs)


def test_aims_are_against_the_best_single_part() -> None:
    rows = composition.compare(
        results({"JSQ": 1.0, "composition": 1.02}, {"BR-0": 100.0, "composition": 99.5})
    )
    ttft, throughput = rows[-2:]
    assert (ttft.ours, ttft.met) == (
        pytest.approx(2.0),
        False,
    )  # JSQ is the best part, 1.02 s is 2 % above it
    assert (throughput.ours, throughput.met) == (pytest.approx(-0.5), True)
    assert rows[0].ours == 1
    assert rows[1].ours == pytest.approx(49.0)  # NetKV: 2.0 s
    against = {row.name.split()[-1]: row for row in rows[2:-2]}
    assert (against["NetKV"].ours, against["NetKV"].met) == (pytest.approx(-49.0), True)
    assert (against["JSQ"].ours, against["JSQ"].met) == (pytest.approx(2.0), False)


def test_the_static_stack_is_no_part() -> None:
    rows = composition.compare(results({"static stack": 0.5, "composition": 1.9}, {"composition": 90.0}))
    assert rows[0].met is True
