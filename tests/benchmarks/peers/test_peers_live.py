"""The comparison in a short form, on real servers: every row is answered whole; no time is looked at.

Sluice and the floor run with all tests, so that an error in the benchmark shows at once; vllm-router need not be here.
"""

from pathlib import Path

import pytest

from benchmarks.live import wrk
from benchmarks.live.kept import Parts
from benchmarks.live.machine import facts
from benchmarks.peers import environment
from benchmarks.peers.__main__ import CODE, Setup, failures, run
from benchmarks.peers.report import markdown, rows
from benchmarks.peers.rows import PYTHON, WRK, Case
from benchmarks.peers.sides import BARE, HOT, LEAN, ROUTER, SIDES, SLUICE

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

CHOSEN = (
    Case(PYTHON, 8),
    Case(PYTHON, 8, tokens=1),
    Case(PYTHON, 8, tokens=500),
    Case(PYTHON, 8, words=5000),
)


def silent(_text: str) -> None:
    """Progress that nobody reads."""


@pytest.mark.parametrize(
    "sides",
    [
        pytest.param((SLUICE, BARE), id="sluice and the floor"),
        pytest.param(
            (ROUTER, LEAN),
            id="vllm-router",
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(
                    environment.installed() is None,
                    reason="vllm-router is not here: python -m benchmarks.peers.environment installs it",
                ),
            ],
        ),
    ],
)
def test_every_side_answers_every_row(sides: tuple[str, ...], tmp_path: Path) -> None:
    executable = wrk.find(None)
    cases = CHOSEN if executable is None else (*CHOSEN, Case(WRK, 8))
    setup = Setup(1, sides, cases, quick=True)
    kept = Parts("peers", facts("benchmarks.peers.__main__", CODE), {}, tmp_path)
    found = run(setup, environment.installed(), executable, kept, silent)
    samples = [one for part in found for one in part["samples"]]
    assert [(one["side"], one["row"]) for one in samples] == [(s, c.name) for s in sides for c in cases]
    assert failures({"rounds": found}) == {}
    for one in samples:
        assert one["requests"] > 0 and one["requests_per_s"] > 0
        # the roles of the processes in between are known
        assert set(HOT[one["side"]]) <= set(one["cpu_ms"])
    whole = {"rounds": found, "notes": [], "peer": {}, "tokenising": []}
    assert list(rows(whole)) == []  # one round has no interval
    assert all(SIDES[side] in markdown(whole) for side in sides)
