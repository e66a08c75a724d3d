"""Metrics of a run, by hand."""

import pytest

from benchmarks.sim.metrics import Window, meets_slo, summarise
from benchmarks.sim.records import RequestRecord, RunResult, StepStats


def record(attempt_id: str, arrived_s: float, **changes) -> RequestRecord:
    """Prompt 100, 11 tokens out; each stage one second after the other."""
    made = RequestRecord(attempt_id, "standard", 100, 11, arrived_s)
    stages = (
        "prefill_started_s",
        "prefill_done_s",
        "decode_routed_s",
        "transfer_started_s",
        "transfer_done_s",
    )
    for i, name in enumerate(stages, start=1):
        setattr(made, name, arrived_s + i)
    made.first_token_s, made.finished_s = arrived_s + 6, arrived_s + 7
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def result(*requests: RequestRecord, **changes) -> RunResult:
    steps = StepStats(steps=4, imbalance_sum=100.0, idle_s=1.0, busy_s=3.0, tokens=200)
    return RunResult(list(requests), changes.pop("steps", steps), duration_s=20.0, **changes)


def test_times_of_the_stages():
    found = summarise(result(record("a", 0.0)))
    expected = {
        "prefill_queue": 1,
        "prefill": 1,
        "pool": 1,
        "transfer": 1,
        "decode_wait": 1,
        "ttft": 6,
        "jct": 7,
    }
    assert {name: found[f"{name}_mean_s"] for name in expected} == expected
    # one second for the ten tokens after the first
    assert found["tpot_p99_s"] == pytest.approx(0.1)


def test_percentiles_of_arrivals_in_the_window():
    requests = [
        RequestRecord(str(i), "standard", 100, 11, i * 0.1, first_token_s=i * 0.1 + 1 + i) for i in range(101)
    ]
    found = summarise(result(*requests), Window(0.0, 20.0))
    assert (
        found["ttft_mean_s"],
        found["ttft_p50_s"],
        found["ttft_p95_s"],
        found["ttft_p99_s"],
    ) == pytest.approx((51, 51, 96, 100))
    # warm-up left out: arrivals from 5 s on are the requests 50..100
    later = summarise(result(*requests), Window(5.0, 20.0))
    assert later["requests"] == 51
    assert later["ttft_p50_s"] == pytest.approx(76)


def test_the_end_of_the_window_is_open():
    found = summarise(result(record("a", 1.0), record("b", 2.0)), Window(1.0, 2.0))
    assert found["requests"] == 1


def test_slos_count_what_never_got_there_as_missed():
    slo = {"ttft_slo_s": 6.5, "tpot_slo_s": 0.2}
    requests = [
        record("met", 0.0, **slo),
        record("slow start", 0.0, first_token_s=6.6, **slo),
        record("slow tokens", 0.0, finished_s=20.0, **slo),
        record("rejected", 0.0, first_token_s=None, finished_s=None, rejected="full", **slo),
        record("unfinished", 0.0, first_token_s=6.0, finished_s=None, **slo),
    ]
    found = summarise(result(*requests), Window(0.0, 10.0))
    assert found["ttft_slo_share"] == 3 / 5
    assert found["tpot_slo_share"] == 2 / 5
    assert found["slo_share"] == 1 / 5
    assert found["goodput_per_s"] == 1 / 10
    assert (found["finished"], found["rejected"], found["unfinished"]) == (3, 1, 1)


def test_a_single_token_has_no_tpot_to_miss():
    one = record("a", 0.0, output_tokens=1, tpot_slo_s=0.001)
    assert meets_slo(one)
    assert summarise(result(one))["tpot_slo_share"] == 1.0
    assert summarise(result(one))["tpot_mean_s"] is None


def test_without_slos_attainment_is_unknown_and_goodput_counts_what_finished():
    found = summarise(result(record("a", 0.0), record("b", 0.0, finished_s=None)))
    assert found["slo_share"] is None and found["ttft_slo_share"] is None
    assert found["goodput_per_s"] == 1 / 20


def test_steps_tiers_hits_links_and_decisions():
    requests = [
        record("a", 0.0, tier=2, transfer_bytes=3 * 10**9, prefill_hit_tokens=50, preemptions=2),
        record("b", 0.0, tier=3, transfer_bytes=10**9, decode_hit_tokens=20),
        record("c", 0.0, tier=2, transfer_bytes=10**9),
        record("d", 0.0, colocated=True),
    ]
    run = result(*requests, link_use={"core": 0.4}, decisions={"netkv: least": 3}, peaks={"pool": 7.0})
    found = summarise(run, Window(0.0, 10.0))
    assert found["throughput_tok_s"] == 10.0  # steps are the run's, over its 20 s
    assert found["imbalance_tokens"] == 25.0
    assert found["barrier_idle_share"] == 0.25
    assert (found["tier_share/2"], found["tier_share/3"]) == (2 / 3, 1 / 3)
    assert found["tier_gbytes/2"] == 4.0 and found["transfer_gbytes"] == 5.0
    assert (found["prefill_hit_share"], found["decode_hit_share"]) == (50 / 400, 20 / 400)
    assert found["colocated_share"] == 0.25 and found["preemptions"] == 2
    assert (
        found["link_use/core"] == 0.4 and found["decisions/netkv: least"] == 3 and found["peak/pool"] == 7.0
    )


def test_a_run_of_nothing_has_no_figures_and_no_errors():
    found = summarise(result(steps=StepStats()))
    assert found["requests"] == 0
    assert found["ttft_mean_s"] is None and found["slo_share"] is None and found["imbalance_tokens"] is None
    assert found["prefill_hit_share"] is None and found["barrier_idle_share"] is None


def test_a_window_without_length_and_impossible_times_are_refused():
    with pytest.raises(ValueError, match="no length"):
        summarise(result(), Window(20.0, 20.0))
    with pytest.raises(ValueError, match="records are wrong"):
        summarise(result(record("a", 5.0, first_token_s=1.0)))
