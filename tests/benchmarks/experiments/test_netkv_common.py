"""NetKV's runs: what the cluster is made of, which requests a window has, how TBT is read from records."""

import itertools
import statistics

import pytest

from benchmarks.experiments import netkv_common as netkv
from benchmarks.sim.records import RequestRecord
from benchmarks.workloads.prefixes import ideal_hit_share
from benchmarks.workloads.record import WorkloadRequest

ROWS = tuple(
    WorkloadRequest(f"r{i}", float(i), 4096 + 100 * (i % 200), 20 + i % 7) for i in range(4000)
)  # one a second


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netkv, "_rows", lambda trace, workload, seed: ROWS)


def test_the_paper_s_cluster() -> None:
    prefill, decode = netkv.sim_config(netkv.config("rag", "NetKV-Full"), 0).engines
    assert (prefill.count, decode.count, decode.slots) == (4, 12, 64)
    assert decode.kv_blocks * decode.block_size_tokens == pytest.approx(180e9 / 327_680, abs=128)
    assert len(set(prefill.nodes)) == 2  # one rack
    assert not set(prefill.nodes) & set(decode.nodes)


@pytest.mark.parametrize("load", [1.0, 2.5])
def test_a_window_has_the_rate_that_is_asked_for(load: float) -> None:
    made = netkv.requests(netkv.config("rag", "RR", load=load), 3)
    inside = [r for r in made if r.at_s < 20 / load]
    assert len(inside) == pytest.approx(6.09 * 20, abs=12.6)
    assert made[-1].at_s > 60 / load  # the load stays up
    assert {r.ttft_slo_s for r in made} == {5.0}


def test_requests_come_in_the_bursts_of_a_trace_twice_as_dense() -> None:
    """RAG keeps 0.638 of 19.7 rows a tick: 12.6 requests every 2.06 s at 100 %, every 1.03 s at 200 %."""
    for load in (1.0, 2.0):
        made = netkv.requests(netkv.config("rag", "RR", load=load), 2)
        times = sorted({r.at_s for r in made})
        gaps = {round(b - a, 3) for a, b in itertools.pairwise(times)}
        assert gaps == {round(2.0637 / load, 3)}
        assert len(made) / len(times) == pytest.approx(12.6, rel=0.1)
    spread = netkv.requests(netkv.config("rag", "RR", spread=True), 2)
    assert len({r.at_s for r in spread}) == len(spread)
    assert [r.request_id for r in spread] == [
        r.request_id for r in netkv.requests(netkv.config("rag", "RR"), 2)
    ]


def test_every_load_measures_the_same_requests() -> None:
    def measured(load: float) -> list[str]:
        config = netkv.config("rag", "RR", load=load)
        made, sim = netkv.requests(config, 1), netkv.sim_config(config, 1)
        assert sim.measure_s is not None
        return [r.request_id for r in made if sim.warmup_s <= r.at_s < sim.warmup_s + sim.measure_s]

    assert measured(1.0) == measured(2.0) == measured(0.5)
    assert len(measured(1.0)) == pytest.approx(6.09 * 15, abs=12.6)


def test_loads_and_schedulers_see_the_same_requests_and_seeds_others() -> None:
    one, two = (netkv.requests(netkv.config("rag", "RR", load=load), 1) for load in (1.0, 2.0))
    assert [r.prompt_tokens for r in one[:100]] == [r.prompt_tokens for r in two[:100]]
    assert one == netkv.requests(netkv.config("rag", "NetKV-Full"), 1)
    starts = {netkv.requests(netkv.config("rag", "RR"), seed)[0].request_id for seed in range(5)}
    assert len(starts) == 5


def test_more_windows_lie_closer_and_five_are_among_twenty() -> None:
    starts = [netkv.window_start(16_000, seed, 20) for seed in range(20)]
    assert starts == list(range(1_000, 16_000, 750))
    assert [netkv.window_start(16_000, seed) for seed in range(6)] == [
        1_000,
        4_000,
        7_000,
        10_000,
        13_000,
        1_000,
    ]


def test_one_nic_an_instance_and_its_uplinks_are_told() -> None:
    made = netkv.sim_config(netkv.config("rag", "NetKV-Uplinks", fixed_nic=True), 0)
    assert [spec.nics for spec in made.engines] == [(0, 4, 0, 4), (0, 4) * 6]
    assert made.network.uplinks == {0: 1, 1: 1, 2: 2, 3: 4}  # type: ignore[union-attr]
    assert netkv.sim_config(netkv.config("rag", "NetKV-Full", fixed_nic=True), 0).network.uplinks is None  # type: ignore[union-attr]


def test_tuning_is_before_every_window() -> None:
    tuned = netkv.requests(netkv.config("rag", "CLA*", tuning=True, load=0.8), 0)
    used = [r.request_id for r in tuned if r.at_s < netkv.TUNING_S / 0.8]
    first_window = netkv.requests(netkv.config("rag", "RR"), 0)[0].request_id
    assert len(used) == pytest.approx(6.09 * 30, abs=12.6)
    assert ROWS[netkv.window_start(len(ROWS), 0)].request_id == first_window
    assert max(int(request_id[1:]) for request_id in used) < netkv.window_start(len(ROWS), 0)


def test_a_large_cluster_goes_round_the_trace_without_repeating_a_request() -> None:
    made = netkv.requests(netkv.config("rag", "RR", gpus=1024), 4)
    assert len({r.request_id for r in made}) == len(made) > 4000 * 3 // 16
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(made))


def test_tbt_counts_the_batch_that_a_request_enters() -> None:
    """Three on one worker, in a batch of 1, 2 and, as the first has gone, 2; one alone on another."""
    lives = [("a", 0.0, 2.0), ("a", 1.0, 9.0), ("a", 3.0, 4.0), ("b", 1.0, 2.0)]
    records = [
        RequestRecord(f"r{i}", "rag", 1, 1, 0.0, decode_worker=worker, first_token_s=first, finished_s=last)
        for i, (worker, first, last) in enumerate(lives)
    ]
    expected_s = 0.01237 + 0.000115 * statistics.mean([1, 2, 2, 1])
    assert netkv.entry_tbt_s(records) == pytest.approx(expected_s)
    assert netkv.entry_tbt_s([]) is None


def test_a_run_gives_the_figures_and_repeats() -> None:
    config = netkv.config("rag", "NetKV-Full", load=0.5)
    found = netkv.run_one(config, 0)
    assert found == netkv.run_one(config, 0)
    assert found["ttft_mean_s"] is not None
    assert found["tier_share/2"] is not None
    assert "tier_share/0" not in found
    assert "tier_share/1" not in found


def test_thinning_keeps_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    netkv._rows.cache_clear()
    monkeypatch.setattr(netkv, "build", lambda spec, seed: list(ROWS))
    kept, kind = netkv._rows(netkv.or_excerpt(netkv.TRACE), "rag", 0), netkv.WORKLOADS["rag"]
    assert kind.thin_above is not None
    short = [r for r in ROWS if r.prompt_tokens <= kind.thin_above]
    assert [r for r in kept if r.prompt_tokens <= kind.thin_above] == short
    assert len(kept) - len(short) == pytest.approx(0.2 * (len(ROWS) - len(short)), rel=0.15)
    assert netkv._rows(netkv.or_excerpt(netkv.TRACE), "rag", 1) == kept
    netkv._rows.cache_clear()


def test_options_of_what_the_paper_leaves_open_reach_the_cluster() -> None:
    """A quarter of 100 Gbit/s a NIC: tier 2 has 12.5 Gbit/s. A quarter of the KV: 45 GB."""
    config = netkv.config(
        "rag", "NetKV-Full", transfer_flows=4, nic_gbit=25.0, kv_share=0.25, prefill=[0.01, 1e-4]
    )
    made = netkv.sim_config(config, 0)
    prefill, decode = made.engines
    assert (prefill.transfer_flows, decode.transfer_flows) == (1, 4)
    assert decode.kv_blocks * decode.block_size_tokens == pytest.approx(45e9 / 327_680, abs=128)
    assert (prefill.profile.prefill_base_s, prefill.profile.prefill_per_token_s) == (0.01, 1e-4)
    assert made.network.topology.tier_bytes_per_s[2] == 12.5e9 / 8  # type: ignore[union-attr]
    plain = netkv.sim_config(netkv.config("rag", "NetKV-Full"), 0)
    assert plain.engines[1].transfer_flows == 1 and plain.engines[0].profile is netkv.PROFILE
    assert plain.network.topology.tier_bytes_per_s[2] == 50e9 / 8  # type: ignore[union-attr]


def test_a_shared_prefix_covers_as_much_as_is_asked_for() -> None:
    """Between none and half of a prompt, and between a quarter and three quarters of it; the same requests share."""
    less, more = (
        ideal_hit_share(netkv.requests(netkv.config("rag", "RR", **options), 1))
        for options in ({"covered": [0.0, 0.5]}, {})
    )
    assert less is not None and more is not None and 0.0 < less < 0.75 * more


def test_four_flows_share_the_bandwidth_of_one_nic() -> None:
    """Four flows of 50 Gbit/s over the one NIC of 100: a transfer is up to twice as fast as one flow, and no faster."""
    one, four = (
        netkv.run_one(netkv.config("rag", "NetKV-Topo-Only", load=0.2, fixed_nic=True, **options), 0)
        for options in ({}, {"transfer_flows": 4})
    )
    assert one["transfer_mean_s"] is not None and four["transfer_mean_s"] is not None
    assert 0.4 < four["transfer_mean_s"] / one["transfer_mean_s"] < 0.95
