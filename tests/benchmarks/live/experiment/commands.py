"""The command `sluice experiment run` as a process, and what it says."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.live.servers import ROOT
from tests.benchmarks.live.experiment.bare_app import Bare

PATIENCE_S = 90.0


def plan(seconds: float = 4, rate: float = 15, **keys: Any) -> str:
    load = {
        "seed": 1,
        "classes": {"interactive": {"prompt_tokens": 40, "output_tokens": 20, "ttft_slo_ms": 500}},
        "phases": [{"name": "all", "for_s": seconds, "rate_per_s": rate}],
        "patience_s": 20,
    }
    return yaml.safe_dump({"name": "a burst", "summary": "A test.", "load": load, **keys}, sort_keys=False)


def start(app: Bare, folder: Path, text: str, *more: str, **keys: Any) -> subprocess.Popen[str]:
    file = folder / f"plan-{time.monotonic_ns()}.yaml"
    file.write_text(text)
    argv = [sys.executable, "-m", "sluice.cli", "experiment", "run", str(file), "--url", app.url, "--json"]
    argv += ["--runs", str(folder / "runs"), *more]
    env = os.environ | {"SLUICE_ADMIN_KEY": app.key}
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **keys)


def told(line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line)
    return found


def until(process: subprocess.Popen[str], event: str, text: str = "") -> dict[str, Any]:
    """Reads the runner's lines until one of this event that has the text."""
    assert process.stdout is not None
    for line in process.stdout:
        if told(line)["event"] == event and text in line:
            return told(line)
    raise AssertionError(f"no {event}: {process.stderr.read() if process.stderr else ''}")


def wait(what: str, done: Any) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end_s, what
        time.sleep(0.1)


def decode_policy(app: Bare) -> str:
    with app.client() as client:
        return client.policies().decode.name
