"""The composition's live benchmark: both bodies are one cluster, blocks are comparable, figures by hand."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from actors.engine.sim.config import SimEngineConfig
from app.config import AppConfig, parse
from benchmarks.experiments.composition_twin import Cluster, Mix, asked, cases, command, simulated
from benchmarks.live import composition_report as report
from benchmarks.live.composition import Setup, measure_live, simulate_block
from benchmarks.live.composition_report import Block, Stream, measure, ratios
from benchmarks.live.kept import Parts
from benchmarks.live.machine import facts
from benchmarks.sim import profiles
from benchmarks.sim.config import ControlPlane
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.text import output_tokens

SMALL = Cluster(prefill=1, near=1, far=1)


@pytest.fixture
def app(tmp_path: Path) -> AppConfig:
    command(Cluster(), Mix(), tmp_path)
    schema = yaml.safe_load((tmp_path / "composition.yaml").read_text())
    return parse(schema["applications"][0]["args"])


def test_the_live_app_and_the_simulator_have_the_same_engines(app: AppConfig) -> None:
    twin = simulated(Cluster(), cases(Cluster())[0], ControlPlane(), (), 0)
    assert [(g.name, g.role, g.replicas) for g in app.engines] == [
        (s.name, s.role.value, s.count) for s in twin.engines
    ]
    for group, spec in zip(app.engines, twin.engines, strict=True):
        live: SimEngineConfig = group.engine_config("e", "m", "m")
        names = [
            "kv_blocks",
            "block_size_tokens",
            "prefill_budget_tokens",
            "lease_s",
            "chunked_prefill",
            "slots",
        ]
        assert [getattr(spec, name) for name in names] == [getattr(live, name) for name in names]
        for name in profiles.FIELDS:
            assert getattr(spec.profile, name) == getattr(live.timing_profile(), name), name


def test_both_have_the_same_links_dispatcher_and_prefill_policy(app: AppConfig) -> None:
    twin = simulated(Cluster(), cases(Cluster())[0], ControlPlane(), (), 0)
    assert app.router.dispatch_config() == twin.dispatch == DispatchConfig()
    assert (app.router.prefill.name, app.router.prefill.params) == twin.prefill
    racks = {group.name: group.topology.rack for group in app.engines}
    assert twin.network is not None
    places = twin.network.places  # type: ignore[attr-defined]
    assert {name.rpartition("-")[0]: place.rack for name, place in places.items()} == racks
    links = app.engines[0].engine_config("prefill-0", "m", "m").links
    for tier, pattern in ((1, "near-*"), (3, "far-*")):
        assert twin.network.bytes_per_s[tier] == links[pattern].bandwidth_bytes_per_s  # type: ignore[attr-defined]
        assert twin.network.latency_s[tier] == links[pattern].latency_s  # type: ignore[attr-defined]


def test_lengths_are_forecast_in_both_and_nothing_is_fitted(app: AppConfig) -> None:
    predictor = app.router.predictor_config()
    twin = simulated(Cluster(), cases(Cluster())[0], ControlPlane(), (), 0).forecasts
    assert twin is not None
    assert (predictor.enabled, predictor.folder) == (True, None)
    assert predictor.total_at_arrival is twin.total_at_arrival is True
    assert predictor.window_tokens == twin.window_tokens


def test_an_answer_has_its_length_and_only_the_engine_is_told() -> None:
    for one in Mix().requests(40.0, 20.0, 3):
        assert one.max_tokens is not None
        assert 2 <= one.output_tokens <= one.max_tokens == Mix().output_cap
        assert output_tokens(one.prompt_tokens, one.max_tokens, 1.0, one.output_tokens) == (
            one.output_tokens,
            True,
        )


def test_the_blocks_of_a_round_send_the_same_requests_and_rounds_differ() -> None:
    setup = Setup(seconds=5.0)
    work = setup.work(0.9, 0)
    assert work == setup.work(0.9, 0)
    assert work != setup.work(0.9, 1)
    slower = setup.work(0.6, 0)
    assert 0.5 * len(work) < len(slower) < 0.85 * len(work)  # about two thirds
    told, untold = (
        asked(cases(setup.cluster)[-1], work),
        asked(replace(cases(setup.cluster)[-1], users=False), work),
    )
    assert told == work
    assert [replace(one, client="") for one in work] == untold
    assert len({one.client for one in work}) > 5


def test_every_round_begins_with_another_policy() -> None:
    setup = Setup(policies=("NetKV", "JSQ", "composition"))
    orders = [[case.name for case in setup.order(round_)] for round_ in range(3)]
    assert [order[0] for order in orders] == ["NetKV", "JSQ", "composition"]
    assert all(sorted(order) == sorted(setup.policies) for order in orders)


def test_what_is_learnt_before_the_blocks_is_of_the_same_clients_but_of_no_block() -> None:
    setup = Setup()
    known = setup.trained_on()
    assert len(known) == setup.train
    work = [one for load in setup.loads for one in setup.work(load, 0)]
    assert {one.client for one in work} <= {one.client for one in known}
    assert not {(o.prompt_tokens, o.output_tokens, o.at_s) for o in work} & {
        (o.prompt_tokens, o.output_tokens, o.at_s) for o in known
    }


def test_a_blocks_figures_by_hand() -> None:
    """Sent at 0.5 s: not measured, but it streams 9 tokens in 9 s, 2 of them in [1, 3). Sent at 1 and 2 s: TTFT 0.5 and
    1; 5 tokens in 0.4 s after the first, TPOT 0.1; 3 tokens in 4 s, TPOT 2. Of theirs 5 and 0 come before 3 s.
    """
    streams = [Stream(0.5, 0.9, 9.9, 10), Stream(1.0, 1.5, 1.9, 5), Stream(2.0, 3.0, 7.0, 3)]
    found = measure(streams, 3.0)
    assert found["ttft_mean_s"] == pytest.approx(0.75)
    assert found["tpot_mean_s"] == pytest.approx(1.05)
    assert found["tokens_per_s"] == pytest.approx((2.0 + 5.0) / 2.0)
    with pytest.raises(ValueError, match="no answer"):
        measure(streams[:1], 3.0)


def block(case: str, load: float, round_: int, ttft_s: float, late_ms: float = 1.0, lost: int = 0) -> Block:
    figures = dict.fromkeys(report.FIGURES, 1.0) | {"ttft_mean_s": ttft_s, "ttft_p95_s": 2 * ttft_s}
    return Block(
        case, load, round_, 100, lost, figures, {"ingress": 0.2, "client": 0.1, "others": 0.0}, late_ms
    )


def test_a_block_is_compared_with_netkvs_of_the_same_requests() -> None:
    blocks = [block("NetKV", 0.6, 0, 0.2), block("NetKV", 1.1, 0, 1.0), block("NetKV", 1.1, 1, 2.0)]
    blocks += [
        block("mine", 0.6, 0, 0.1),
        block("mine", 1.1, 1, 1.0),
        block("mine", 1.1, 0, 0.8, late_ms=9.0, lost=3),
    ]
    assert sorted(ratios(blocks, "mine", "ttft_mean_s")) == pytest.approx([0.5, 0.5, 0.8])
    assert ratios(blocks, "mine", "ttft_mean_s", 1.1) == pytest.approx([0.5, 0.8])
    shown = report.text(blocks, blocks).splitlines()
    line = next(one for one in shown if "mine" in one and one.strip().startswith("1.1"))
    assert "0.65 (0.50 .. 0.80) | 0.65 (0.50 .. 0.80)" in line
    assert shown[-1].startswith("in 1 of 6 blocks the client was more than 5 ms late")
    row = next(r for r in report.rows(blocks, blocks) if r["case"] == "mine" and r["load"] is None)
    assert (row["lost"], row["requests"], row["blocks"]) == (3, 300, 3)


def test_a_simulated_block_knows_the_clients_only_where_they_are_told() -> None:
    setup = Setup(cluster=SMALL, seconds=6.0, train=200, ties=1)
    told = cases(SMALL)[-1]
    untold = replace(told, users=False)
    first = simulate_block(setup, told, 1.1, 0)
    assert first == simulate_block(setup, told, 1.1, 0)
    assert first.figures != simulate_block(setup, untold, 1.1, 0).figures
    assert first.requests == len(setup.work(1.1, 0))


@pytest.mark.live
@pytest.mark.timeout(400)
@pytest.mark.nightly
def test_a_short_run_against_a_live_app(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup = Setup(
        cluster=SMALL, policies=("NetKV", "composition"), loads=(0.9,), rounds=1, seconds=3.0, train=20
    )
    machine = facts("benchmarks.live.composition")
    blocks, seen = measure_live(setup, print, Parts("composition", machine, asdict(setup), tmp_path))
    assert [one.case for one in blocks] == ["NetKV", "composition"]
    assert seen["lost"] == []
    assert seen["sent"] == 20 + 2 * len(setup.work(0.9, 0))
    assert seen["forecasts_a_request"] >= 1.0
    assert all(one.figures["ttft_mean_s"] > 0 and one.cores["ingress"] >= 0 for one in blocks)
    assert "composition: TTFT" in capsys.readouterr().out
    # the same command goes on after an interruption: only the part that is not kept is measured
    longer = replace(setup, rounds=2)
    kept = Parts("composition", machine, asdict(longer), tmp_path)
    first = [asdict(one) for one in blocks]
    kept.put("round 0, load 0.9", {"blocks": first, "sent": seen["sent"] - 20, "lost": []})
    more, seen = measure_live(longer, print, kept)
    assert more[:2] == blocks and [(one.case, one.round) for one in more[2:]] == [
        ("composition", 1),
        ("NetKV", 1),
    ]
    assert seen["sent"] == 20 + 2 * len(setup.work(0.9, 0)) + 2 * len(setup.work(0.9, 1))
    assert set(seen["parts"]) == {"round 0, load 0.9", "round 1, load 0.9"}
    assert "round 0, load 0.9: kept already" in capsys.readouterr().out
