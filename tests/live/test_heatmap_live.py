"""`sluice profile heatmap` on a whole application with sim engines, and the policy that reads what it wrote."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.serving import PATIENCE_S, ROOT, App, config_file, serving

pytestmark = [pytest.mark.live, pytest.mark.timeout(900), pytest.mark.nightly]

LIKES = {"prefill_tokens": [16, 512], "ratios": [0.1], "cells": [[-1.0], [9.0]]}
"""Short prompts colocated, long ones disaggregated."""


def quick(args: dict[str, Any]) -> None:
    for group in args["engines"]:
        group["options"] = {"profile": "tick_1ms"}
    args["router"]["prefill"] = {"name": "pd_heatmap", "params": {"heatmap": LIKES, "load_correction": 0.0}}


def profile(app: App, out: Path) -> "subprocess.CompletedProcess[str]":
    words = ["profile", "heatmap", "--url", app.url, "--out", str(out), "--prefill-tokens", "16,64"]
    words += ["--ratios", "0.25,1", "--rates", "20,40", "--requests", "3"]
    command = [sys.executable, "-m", "sluice.cli", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_the_profiler_measures_a_running_application_and_the_policy_follows_a_heatmap(tmp_path: Path) -> None:
    out = tmp_path / "map.json"
    with serving(config_file(tmp_path, "../app/profile/examples/sim.yaml", quick)) as app:
        done = profile(app, out)
        assert done.returncode == 0, done.stderr
        found = json.loads(out.read_text())
        assert found["provenance"]["engines_per_mode"] == {"colocated": 2, "disaggregated": 2}
        assert {s["requests"] for p in found["pairs"] for s in (p["colocated"], p["disaggregated"])} == {6}
        assert len(found["pairs"]) == 8
        app.wait_idle()
        for tokens, moved in ((16, False), (512, True)):
            before = app.metric("sluice_kv_transfer_bytes_total")
            body = {"prompt": list(range(300, 300 + tokens)), "max_tokens": 2}
            assert httpx.post(f"{app.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200
            assert (app.metric("sluice_kv_transfer_bytes_total") > before) is moved
