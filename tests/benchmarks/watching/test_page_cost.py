"""The cost of a page, in short and over few engines: each view has figures, and the result is kept."""

import json
from pathlib import Path

import pytest

from benchmarks.watching.page_report import rows
from tests.dashboard import cost
from tests.dashboard.browsing import needs_chromium

pytestmark = [pytest.mark.browser, needs_chromium, pytest.mark.timeout(180)]


def test_every_view_has_its_cost_and_the_result_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, ms in (("SETTLE_MS", 300), ("TRACED_MS", 1500), ("STAY_MS", 200)):
        monkeypatch.setattr(cost, name, ms)
    options = ["--engines", "16", "--minutes", "0.02", "--period", "0.2", "--out", str(tmp_path)]
    assert cost.main(options) == 0
    whole = json.loads((tmp_path / "page.json").read_text())
    assert set(whole["views"]) == set(cost.VIEWS)
    assert all(one["update_ms"] > 0 and one["longest_task_ms"] > 0 for one in whole["views"].values())
    assert whole["heap_mb"] and whole["nodes"] and whole["updates"] > 0
    assert whole["command"].startswith("python -m tests.dashboard.cost --engines 16")
    assert {"commit", "code", "code_of"} <= set(whole["machine"])
    assert len([*rows(whole)]) > 2 * len(cost.VIEWS)
