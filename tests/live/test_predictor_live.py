"""Predictors in the whole application: outcomes are logged, a refit runs as a Ray task, serving goes on meanwhile."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from predictors.outcomes import read_log
from tests.live.serving import config_file, plain_client, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

# A refit trains on 80 % of what is logged and needs 500 of these; one that begins earlier saves nothing.
FIRST, MORE, MOST = 600, 100, 2_000


def test_a_refit_runs_beside_the_traffic(tmp_path: Path) -> None:
    folder = tmp_path / "predictor"

    def learning(args: dict[str, Any]) -> None:
        args["engines"] = [
            {"name": "all", "role": "colocated", "kind": "sim", "options": {"mean_output_tokens": 20}}
        ]
        args["router"] = {
            "decode": {"name": "composition"},  # looks at expected lengths
            "predictor": {
                "enabled": True,
                "folder": str(folder),
                "refit_every_s": 2.0,
                "refit_outcomes": 300,
            },
        }

    with serving(config_file(tmp_path, "sim.yaml", learning)) as app, plain_client() as http:

        def ask(n: int) -> int:
            body = {"prompt": f"request number {n} of many", "max_tokens": 100, "user": f"somebody {n % 3}"}
            return http.post(f"{app.url}/v1/completions", json=body).status_code

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(ask, range(FIRST))) == {200}
            app.wait(lambda _: app.metric("sluice_router_predictor_refits_total") >= 1, "a refit has begun")
            asked = FIRST
            while list((folder / "models").glob("*")) == [] and asked < MOST:
                assert set(pool.map(ask, range(asked, asked + MORE))) == {200}
                asked += MORE
        app.wait(lambda _: list((folder / "models").glob("*")) != [], "a refit has saved its model")
        assert app.metric("sluice_router_predictor_refit_failures_total") == 0
        # the router reports its totals once a second
        app.wait(
            lambda _: app.metric("sluice_router_predictor_outcomes_total") >= asked, "outcomes are counted"
        )
        app.wait_idle()
    outcomes = read_log(folder / "outcomes")
    assert len(outcomes.outcomes) == asked
    assert outcomes.damage == ()
    assert len({outcome.arrival.client for outcome in outcomes.outcomes} - {None}) == 3
    logged = b"".join(f.read_bytes() for f in (folder / "outcomes").glob("*"))
    assert b"request number" not in logged
    assert b"somebody" not in logged
