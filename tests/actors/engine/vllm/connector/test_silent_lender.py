"""Two real NIXL agents, each in a process of its own; the lender is stopped, or killed, in the middle of a read."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")
pytest.importorskip("nixl._api", reason="NIXL is not installed; `make setup` installs it")

SCRIPT = Path(__file__).with_name("two_agents.py")
ROOT = SCRIPT.parents[5]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """Returns the facts of a stopped lender and of a killed one."""
    environment = {**os.environ, "UCX_TLS": "tcp,self", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "stop", "kill"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line.removeprefix("SEEN ") for line in run.stdout.splitlines() if line.startswith("SEEN ")]
    assert len(lines) == 2, run.stdout + run.stderr
    return {**json.loads(lines[0]), **json.loads(lines[1])}


@pytest.mark.timeout(400)
@pytest.mark.nightly
def test_a_stopped_lender_holds_a_read_which_ends_when_it_goes_on(seen: dict[str, Any]) -> None:
    """The check of the lease gives up and keeps its memory; the lender is not asked again; then all ends well."""
    assert seen["stop"] == {
        "first": True, "stuck": "PROC", "timed_out": True, "refused": True, "overdue": 1,
        "state": "DONE", "overdue_at_end": 0, "second": True, "copied": True,
    }  # fmt: skip


@pytest.mark.timeout(400)
def test_a_killed_lender_ends_its_reads(seen: dict[str, Any]) -> None:
    """Both reads end as errors, so that the blocks of both can be used again."""
    result = seen["kill"]
    assert (result["stuck"], result["overdue"], result["overdue_at_end"]) == ("PROC", 1, 0)
    assert result["state"] not in ("PROC", "DONE")
    assert result["second"] is False
