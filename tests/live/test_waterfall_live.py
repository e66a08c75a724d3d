"""The waterfall's benchmark in its short form: every request of every burst ends well, and the server knows its way."""

import json
from pathlib import Path

import pytest

from benchmarks.live import waterfall

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_every_followed_request_of_a_whole_application_has_its_way(tmp_path: Path) -> None:
    assert waterfall.main(["--concurrency", "1", "4", "--bursts", "4", "--out", str(tmp_path)]) == 0
    cases = json.loads((tmp_path / "waterfall.json").read_text())["cases"]
    assert [(case["clients"], case["requests"]) for case in cases] == [(1, 2), (4, 8)]
    for case in cases:
        names = [row["name"] for row in case["hops"]]
        assert {"tokenise", "queue", "prefill", "pool", "transfer", "step", "from the decode engine"} <= set(
            names
        )
    assert (tmp_path / "waterfall.png").exists() and (tmp_path / "waterfall.md").exists()
