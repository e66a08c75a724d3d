"""The comparison in a short form, on real servers: every side serves and is measured; no figure is judged."""

from pathlib import Path

import pytest

from benchmarks.live.kept import Parts
from benchmarks.live.machine import facts
from benchmarks.overload import __main__ as command
from benchmarks.overload import measure
from benchmarks.overload.load import WEIGHTS, Mix, Times
from benchmarks.overload.report import markdown, rows
from benchmarks.overload.sides import DECODES, NAMES, ROUTER, SLOTS, SLUICE, STEP_S
from benchmarks.peers import environment

pytestmark = [pytest.mark.live, pytest.mark.timeout(300), pytest.mark.nightly]

LOAD = 5.0
BRIEF = Mix(prompt_tokens=40.0, output_tokens=8.0, longest_prompt=100, longest_output=20)
"""Short answers, so that queues fill and a side ends within seconds."""


def silent(_text: str) -> None:
    """Progress that nobody reads."""


@pytest.mark.parametrize(
    "side",
    [
        SLUICE,
        pytest.param(
            ROUTER,
            marks=pytest.mark.skipif(
                environment.installed() is None,
                reason="vllm-router is not here: python -m benchmarks.peers.environment installs it",
            ),
        ),
    ],
)
def test_a_side_serves_what_it_can_and_refuses_the_rest(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "WARM_S", 1.0)
    setup = command.Setup("sim", (LOAD,), (side,), Times(2.0, 2.0, 0.5, patience_s=2.0))
    kept = Parts("overload-sim", facts(command.MODULE, command.CODE), {}, tmp_path)
    peers = command.Peers(program=environment.installed())
    run = command.Run(setup, peers, kept, silent)
    run.mix, run.capacity_per_s = BRIEF, DECODES * SLOTS / (BRIEF.output_tokens * STEP_S)
    (found,) = run.parts()
    # Sluice has asked for API keys, else there would be no part
    assert found["failed"] == 0, found["ends"]
    assert found["goodput_tokens_per_s"] > 0 and 0 < found["refused_share"] < 1, found["ends"]
    assert sum(found[f"served_per_s/{tenant}"] for tenant in WEIGHTS) > 0
    result = {
        "config": {"setup": "sim", "rounds": 1},
        "capacity_per_s": run.capacity_per_s,
        "closed": run.closed,
        "parts": [found],
    }
    assert f"| {LOAD:g} | {NAMES[side]} |" in markdown(result)
    assert any(row.aim for row in rows(result)) is (side == SLUICE)
