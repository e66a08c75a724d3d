"""The report of a page that stays open: slopes with their intervals, by hand, and the plot."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments.base import Row
from benchmarks.watching.opened_report import HISTORY_S, draw, rows


def result(growth_kb_a_minute: float) -> dict[str, Any]:
    """A page whose heap grows by 1 MB a minute while its history fills, and by this much after that."""
    samples = []
    for number in range(1, 181):
        at_s = 10.0 * number
        filling_s, after_s = min(at_s, HISTORY_S), max(0.0, at_s - HISTORY_S)
        heap = 10e6 + 1e6 * filling_s / 60 + 1e3 * growth_kb_a_minute * after_s / 60
        samples.append(
            {
                "at_s": at_s,
                "heap_bytes": heap,
                "nodes": 700,
                "update_ms": 5.0 if number > 1 else None,
                "rss_bytes": 150e6,
                "share": 0.02,
            }
        )
    config = {"view": "overview", "prefill": 6, "decode": 10}
    return {"samples": samples, "config": config, "said": [], "foreign": []}


def row_of(name: str, whole: dict[str, Any]) -> Row:
    [found] = [row for row in rows(whole) if row.name == name]
    return found


@pytest.mark.parametrize(("growth", "expected"), [(0.0, True), (9.0, True), (11.0, False)])
def test_the_heap_must_be_flat_once_the_history_is_full(growth: float, expected: bool) -> None:
    found = row_of("overview, history full: growth of the heap", result(growth))
    assert found.ours == pytest.approx(growth, abs=1e-6)
    assert found.met is expected
    # until then it has to grow
    assert row_of("overview, whole time: growth of the heap", result(growth)).met is None


def test_the_page_says_what_it_cost_and_the_plot_is_drawn(tmp_path: Path) -> None:
    whole = result(0.0)
    assert row_of("overview: main thread, CPU an update, greatest", whole).met is True
    assert row_of("16 engines: CPU of the dashboard, of one core, median", whole).ours == pytest.approx(2.0)
    draw(whole, tmp_path)
    assert (tmp_path / "opened.png").read_bytes().startswith(b"\x89PNG")
    whole["said"] = ["an error"]
    assert row_of("overview: messages of the console, and requests elsewhere", whole).met is False
