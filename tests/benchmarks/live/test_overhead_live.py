"""The overhead benchmark in a short form, on real servers without vLLM: all targets answer; no time is looked at."""

import json
from pathlib import Path

import pytest

from benchmarks.live import overhead
from benchmarks.live.targets import SIM, SIM_DEFAULTS

pytestmark = [pytest.mark.live, pytest.mark.timeout(900), pytest.mark.nightly]


def test_every_target_answers_and_the_result_says_what_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.live.kept.FOLDER", tmp_path / "kept")
    options = ["--only", "sim", "--quick", "--concurrency", "8", "--requests", "16"]
    assert overhead.main([*options, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "overhead-sim.json").read_text())
    targets = list(dict.fromkeys(case["target"] for case in found["cases"]))
    assert targets == ["bare listener", SIM, SIM_DEFAULTS]
    assert [tree["target"] for tree in found["trees"]] == [SIM, SIM_DEFAULTS]
    assert found["config"]["policies"][SIM_DEFAULTS]["decode"] == "composition"
    assert found["machine"]["hot_path"] in ("compiled", "pure Python")
    # of a stream of 500 tokens, and at rest
    assert (tmp_path / "overhead-sim.md").read_text().count("| at most ") == 4
