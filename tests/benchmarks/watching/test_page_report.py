"""The report of a page beside many engines: each view against its aim."""

from typing import Any

import pytest

from benchmarks.watching.page_report import MOST_UPDATE_MS, rows

WHOLE: dict[str, Any] = {
    "engines": 1024,
    "views": {
        "overview": {"update_ms": 12.5, "longest_task_ms": 30.0},
        "engines": {"update_ms": 60.0, "longest_task_ms": 90.0},
    },
    "heap_mb": [9.0, 9.5, 9.25],
    "nodes": [4000, 4100],
    "said": [],
    "foreign": [],
}


def test_each_view_is_judged_by_itself() -> None:
    found = {row.name: row for row in rows(WHOLE)}
    update = "main thread, CPU an update, mean"
    assert found[f"1024 engines, overview: {update}"].met is True
    assert found[f"1024 engines, engines: {update}"].met is False
    assert found[f"1024 engines, engines: {update}"].aim == f"at most {MOST_UPDATE_MS:g}"
    assert found["1024 engines, overview: main thread, CPU of the longest task"].ours == 30.0
    assert found["1024 engines, all views in turn: heap after the first turn"].ours == 9.0
    assert found["1024 engines, all views in turn: heap at the end"].ours == 9.25
    assert found["1024 engines, all views in turn: DOM nodes at the end"].ours == 4100


@pytest.mark.parametrize("wrong", ["said", "foreign"])
def test_a_page_that_complains_or_asks_elsewhere_fails(wrong: str) -> None:
    assert [*rows(WHOLE)][-1].met is True
    assert [*rows({**WHOLE, wrong: ["this"]})][-1].met is False
