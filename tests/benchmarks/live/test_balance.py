"""The live measurement of balance and waits, without an app: its configuration, and its table by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config import AppConfig
from benchmarks.document import OTHERS
from benchmarks.live import balance, kept
from benchmarks.live.balance import SETUPS, Setup, bodies, choice, command, ttft_s
from benchmarks.live.balance_report import block_of, table
from benchmarks.live.load import LoadResult
from benchmarks.loads import Seen, Window
from policies.routing.registry import DECODE, decode_policy

WINDOWS = [
    Window("join_shortest_queue", 100.0, 110.0),
    Window("balance_route_h", 120.0, 130.0),
    Window("join_shortest_queue", 140.0, 150.0),
]


@pytest.mark.parametrize("name", list(SETUPS))
def test_every_setup_serves_with_the_predictor_on_and_its_policies_exist(name: str, tmp_path: Path) -> None:
    setup = SETUPS[name]
    made = command(setup, tmp_path)
    schema = yaml.safe_load((tmp_path / "balance.yaml").read_text())
    args = schema["applications"][0]["args"]
    config = AppConfig.model_validate(args)
    assert config.router.predictor_config().enabled
    assert config.router.dispatch_config().max_queue >= setup.connections - setup.decode_engines * setup.slots
    assert made.port and set(setup.policies) <= set(DECODE)
    for policy in setup.policies:
        decode_policy(**choice(setup, policy))
    assert len(set(bodies(setup, 5))) == 5
    assert bodies(setup, 5, round_=1) != bodies(setup, 5)


def test_ttft_belongs_to_the_window_in_which_the_first_text_came() -> None:
    load = LoadResult(ttft_s=[1.0, 2.0, 3.0, 4.0], first_at_s=[99.9, 100.0, 125.0, 149.0])
    assert ttft_s(load, WINDOWS, "join_shortest_queue") == [2.0, 4.0]
    assert ttft_s(load, WINDOWS, "balance_route_h") == [3.0]


def test_a_row_has_imbalance_waits_and_forecast_departures_over_all_rounds() -> None:
    """10 s a window, two rounds of join-shortest-queue and one of BR-H."""
    samples = [
        block_of("join_shortest_queue", Seen([300], [2], [50.0], [1.0, 3.0], 0, 300), [1.0]),
        block_of("balance_route_h", Seen([100, 100], [2, 2], [50.0, 50.0], [], 7, 400), []),
        block_of("join_shortest_queue", Seen([500], [0], [50.0], [50.0], 0, 100), [2.0]),
    ]
    jsq, br_h = table(10.0, samples)
    assert (jsq["imbalance_tokens"], br_h["below_join_shortest_queue"]) == (400, 4.0)
    assert (jsq["wait_mean_s"], jsq["wait_p99_s"], jsq["wait_longest_s"]) == (18.0, 49.06, 50.0)
    assert (jsq["ttft_mean_s"], jsq["tok_s"], jsq["departures"]) == (1.5, 20, 0)
    assert (jsq["pool_empty_share"], br_h["tok_s"]) == (0.5, 40)
    # nobody left the pool and no first text came: there is no wait, and not one of 0 s
    assert [br_h[key] for key in ("wait_mean_s", "wait_longest_s", "ttft_p99_s", "departures")] == [
        None,
        None,
        None,
        7,
    ]


def test_a_run_goes_on_after_its_finished_rounds_and_documents_compute_from_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []

    def measured(setup: Setup, round_: int, say: object) -> dict[str, Any]:
        if len(ran) == 1:
            ran.append(-1)
            raise KeyboardInterrupt
        ran.append(round_)
        seen = {
            "random": Seen([300 + round_], [1], [9.0], [2.0], 0, 5),
            "netkv": Seen([100], [1], [9.0], [], 0, 5),
        }
        blocks = [block_of(policy, what, []) for policy, what in seen.items()]
        return {"round": round_, "served": 7, "lost": {}, "replay_differs": 0, "blocks": blocks}

    monkeypatch.setattr(balance, "one_round", measured)
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")
    arguments = ["--policies", "random", "netkv", "--seed", "3", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        balance.main(arguments)
    assert balance.main(arguments) == 0
    assert ran == [0, -1, 1] and "round 0: kept already" in capsys.readouterr().out
    assert list((tmp_path / "kept").iterdir()) == []
    whole = json.loads((tmp_path / "balance.json").read_text())
    assert whole["command"] == "python -m benchmarks.live.balance --policies random netkv --seed 3"
    rows = {row.name: row.ours for row in OTHERS["balance/balance.json"].read(whole)}
    assert rows["random: imbalance"] == round((300 + 301) / 2) and rows["requests served"] == 14
    # a changed sample changes the figure
    whole["rounds"][0]["blocks"][1]["imbalance_tokens"] = [200]
    rows = {row.name: row.ours for row in OTHERS["balance/balance.json"].read(whole)}
    assert rows["netkv: imbalance of random over it"] == pytest.approx(2.0, abs=0.01)
