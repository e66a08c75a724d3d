"""FlowKV's role switch in the whole application on sim engines: an idle decode engine serves prefill for a while, and
streams under way stay.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.live.serving import PATIENCE_S, App, config_file, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(900), pytest.mark.nightly]


def lending(args: dict[str, Any]) -> None:
    """One prefill engine that computes slowly, and three decode engines; any load is a busy role."""
    sim = {"kind": "sim"}
    slow = {"timing": {"prefill_base_s": 0.2}, "prefill_budget_tokens": 64, "slots": 8}
    args["engines"] = [
        {"name": "p", "role": "prefill", "replicas": 1, "options": slow, **sim},
        {"name": "d", "role": "decode", "replicas": 3, "options": {"timing": {"decode_base_s": 0.02}}, **sim},
    ]
    args["router"] = {
        "prefill": {"name": "join_shortest_queue"},
        "role_switch": {"switch_s": 3.0, "after_s": 1.0},
        "regimes": {
            "prefill_low": 0.2,
            "prefill_high": 50.0,
            "decode_low": 0.9,
            "decode_high": 50.0,
            "idle": 0.1,
        },
    }


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with serving(config_file(tmp_path_factory.mktemp("roles"), "sim.yaml", lending)) as running:
        # an application is ready with fewer, and the load would be over before there is an engine to lend
        running.wait(lambda status: len(status["engines"]) == 4, "one prefill and three decode engines")
        yield running


def answer(app: App, prompt: str, tokens: int) -> str:
    body = {"model": "sim", "prompt": prompt, "max_tokens": tokens, "stream": True}
    text = ""
    with httpx.stream("POST", f"{app.url}/v1/completions", json=body, timeout=PATIENCE_S) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line[6:])
                assert "error" not in piece, piece
                text += piece["choices"][0]["text"]
    return text


def test_an_idle_engine_is_lent_and_streams_stay(app: App) -> None:
    undisturbed = answer(app, "a long stream", 200)

    def lent(status: dict[str, Any]) -> bool:
        return sum(engine["role"] == "prefill" for engine in status["engines"]) > 1

    def at_home(status: dict[str, Any]) -> bool:
        return sum(engine["role"] == "prefill" for engine in status["engines"]) == 1

    with ThreadPoolExecutor(40) as pool:
        streams = [pool.submit(answer, app, "a long stream", 200) for _ in range(2)]
        prompts = [pool.submit(answer, app, f"{n} " * 60, 2) for n in range(36)]
        app.wait(lent, "an engine is lent to prefill")
        assert {stream.result() for stream in streams} == {undisturbed}
        assert all(prompt.result().strip() for prompt in prompts)
    app.wait(at_home, "the engine is called home")
    app.wait_idle()
    # the router reports its totals once a second
    app.wait(lambda _: app.metric("sluice_router_role_switches_total") >= 2, "both orders are counted")
