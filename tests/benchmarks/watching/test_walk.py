"""The walk through the dashboard of a live application, in its shortest form: each view once, under load."""

import tempfile
from pathlib import Path

import pytest

from benchmarks.watching import walk
from tests.dashboard.browsing import needs_chromium

pytestmark = [pytest.mark.browser, pytest.mark.live, needs_chromium, pytest.mark.timeout(300)]


def test_every_view_of_a_live_application_is_opened_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "THEMES", walk.THEMES[:1])
    monkeypatch.setattr(walk, "HEIGHTS", dict(list(walk.HEIGHTS.items())[:1]))
    lines: list[str] = []
    setup = walk.Setup(prefill=1, decode=2, ingresses=1, connections=2, load_s=3.0)
    # a unix socket's path is short, and pytest's folders are deep
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        made = walk.walked(setup, ["views"], None, Path(folder), lines.append)
    assert [step["name"] for step in made.steps if step["wrong"]] == [], lines
    assert len(made.steps) > len(walk.THEMES) and made.steps[-1]["served"] > 0
    assert (made.findings, made.said, made.foreign) == ([], [], [])
