"""Both bodies of validate_live are the same cluster; the live half at a small size is marked live."""

import json
from pathlib import Path

import pytest
import yaml

from actors.engine.report import STATUS_ALWAYS_S, STATUS_CHANGED_S
from actors.engine.sim.config import SimEngineConfig
from actors.router.server import FORECAST_S, TICK_S
from app.config import AppConfig
from app.ingress.config import IngressConfig
from benchmarks.experiments import agreement, validate_live
from benchmarks.experiments.twin import Mix, Setup, lone_requests, sim_setup, simulated_times
from benchmarks.live import kept
from benchmarks.sim import profiles
from benchmarks.sim.config import ControlPlane
from policies.dispatch.dispatcher import DispatchConfig

PAIR = ("join_shortest_queue", "join_shortest_queue")


@pytest.fixture
def setup() -> Setup:
    return sim_setup((), 5.0)


def test_the_workload_is_the_seeds() -> None:
    mix = Mix(5.0, 60.0, (64, 512), (32, 160))
    work = mix.requests(1)
    assert work == mix.requests(1)
    assert work != mix.requests(2)
    assert len(work) == pytest.approx(300, abs=6 * 300**0.5)
    assert all(64 <= r.prompt_tokens <= 512 and 32 <= r.output_tokens <= 160 for r in work)
    assert [r.at_s for r in work] == sorted(r.at_s for r in work)


def test_simulated_engines_have_the_limits_and_timing_of_the_live_ones(setup: Setup) -> None:
    for spec in setup.simulated(setup.profile, ControlPlane(), PAIR, 0).engines:
        live = SimEngineConfig("e", role=spec.role.value, **setup.options)
        for name in ("slots", "kv_blocks", "block_size_tokens", "prefill_budget_tokens", "lease_s"):
            assert getattr(spec, name) == getattr(live, name), name
        assert spec.chunked_prefill == live.chunked_prefill
        for name in profiles.FIELDS:
            assert getattr(spec.profile, name) == getattr(live.timing_profile(), name), name


def test_the_simulated_control_plane_has_the_live_periods_and_rules() -> None:
    control, ingress = ControlPlane(), IngressConfig(served_names=("sim",))
    assert (control.status_s, control.status_always_s) == (STATUS_CHANGED_S, STATUS_ALWAYS_S)
    assert (control.tick_s, control.forecast_s) == (TICK_S, FORECAST_S)
    assert control.progress_s == ingress.progress_interval_s


def test_the_live_app_has_the_same_engines_and_dispatcher(setup: Setup, tmp_path: Path) -> None:
    command = setup.command(tmp_path)
    schema = yaml.safe_load((tmp_path / "app.yaml").read_text())
    config = AppConfig.model_validate(schema["applications"][0]["args"])
    assert [(g.role, g.replicas) for g in config.engines] == [("prefill", 2), ("decode", 4)]
    assert config.router.dispatch_config() == DispatchConfig()
    assert command.env == {"RAY_worker_niceness": "0"}


def test_a_lone_simulated_request_takes_the_sum_of_its_parts(setup: Setup) -> None:
    control = ControlPlane(hop_s=0.0, ingress_s=0.004)
    work = lone_requests(setup, 2, 3, 5.0)
    first, last = simulated_times(setup.simulated(setup.profile, control, PAIR, 0), work)
    for got, prompt in ((first, 64), (last, 512)):
        prefill_s = 0.02 + 5e-4 * prompt
        transfer_s = 1e-3 + prompt * setup.profile.kv_bytes_per_token / 0.5e9
        first_step_s = 0.02 + 1e-3 + 2e-6 * prompt
        assert got.ttft_s == pytest.approx(0.004 + prefill_s + transfer_s + first_step_s, abs=1e-5)
        assert got.tpot_s == pytest.approx(
            0.021 + 2e-6 * (prompt + 1.5), abs=1e-6
        )  # steps over +1, +2 tokens


@pytest.mark.live
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_a_short_run_against_a_live_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")
    pairs = ["--policies", "join_shortest_queue/join_shortest_queue", "--policies", "predicted_ttft/netkv"]
    status = validate_live.main(
        ["--seconds", "3", "--seeds", "2", "--attempts", "1", *pairs, "--out", str(tmp_path)]
    )
    # how near they are on a busy machine is no test
    assert status in (0, 1)
    whole = json.loads((tmp_path / "sim.json").read_text())
    assert [case["policies"] for case in whole["cases"]] == [list(PAIR), ["predicted_ttft", "netkv"]]
    sent = len(Mix(5.0, 3.0, (64, 512), (32, 160)).requests(0))
    assert all(case["requests"] == sent and len(agreement.lines_of(case)) == 6 for case in whole["cases"])
    assert whole["control"]["ingress_s"] >= 0
    assert (tmp_path / "sim.png").stat().st_size > 10_000
    assert "TTFT p95" in capsys.readouterr().out
    assert list(whole["parts"]) == ["calibration", "/".join(PAIR), "predicted_ttft/netkv"]
    assert not list((tmp_path / "kept").iterdir())


def test_a_comparison_is_kept_as_it_was() -> None:
    times = [agreement.Times(0.125, 0.01, 1.5), agreement.Times(0.25, None, 0.25)]
    made = validate_live.Comparison(PAIR, times, [times, times[:1]], {"p95": 1.5}, {"app": 0.5}, [20.0])
    assert validate_live.Comparison.of(json.loads(json.dumps(made.as_json()))) == made
