"""The live measurement of balance and waits, without an app: its configuration, and its table by hand."""

from pathlib import Path

import pytest
import yaml

from app.config import AppConfig
from benchmarks.live.balance import SETUPS, Setup, bodies, choice, command, table, ttft_s
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


def test_ttft_belongs_to_the_window_in_which_the_first_text_came() -> None:
    load = LoadResult(ttft_s=[1.0, 2.0, 3.0, 4.0], first_at_s=[99.9, 100.0, 125.0, 149.0])
    assert ttft_s(load, WINDOWS, "join_shortest_queue") == [2.0, 4.0]
    assert ttft_s(load, WINDOWS, "balance_route_h") == [3.0]


def test_a_row_has_imbalance_waits_and_forecast_departures() -> None:
    setup = Setup(policies=("join_shortest_queue", "balance_route_h"), window_s=10.0, rounds=2)
    seen = {
        "join_shortest_queue": Seen([300, 500], [2, 0], [50.0, 50.0], [1.0, 3.0, 50.0], 0, 400),
        "balance_route_h": Seen([100, 100], [2, 2], [50.0, 50.0], [], 7, 400),
    }
    load = LoadResult(ttft_s=[1.0, 2.0], first_at_s=[105.0, 145.0])
    jsq, br_h = table(setup, seen, load, WINDOWS)
    assert (jsq["imbalance_tokens"], br_h["below_join_shortest_queue"]) == (400, 4.0)
    assert (jsq["wait_mean_s"], jsq["wait_p99_s"], jsq["wait_longest_s"]) == (18.0, 49.06, 50.0)
    assert (jsq["ttft_mean_s"], jsq["tok_s"], jsq["departures"]) == (1.5, 20, 0)
    # nobody left the pool and no first text came: there is no wait, and not one of 0 s
    assert [br_h[key] for key in ("wait_mean_s", "wait_longest_s", "ttft_p99_s", "departures")] == [
        None,
        None,
        None,
        7,
    ]
