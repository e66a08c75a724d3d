"""Pauses after a kill: the order of streams, the gap that counts, and the lines through them, by hand."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.recompute import Plan, Seen
from benchmarks.chaos.recompute_report import AFTER_A_KILL, UNDISTURBED, draw, fitted, rows


def test_every_round_has_all_lengths_in_an_order_by_the_seed() -> None:
    plan = Plan((10, 20, 30), repeats=4, seed=1)
    streams = plan.streams()
    assert Counter(streams) == {10: 4, 20: 4, 30: 4}
    assert all(sorted(streams[i : i + 3]) == [10, 20, 30] for i in range(0, 12, 3))
    assert streams == plan.streams() != Plan((10, 20, 30), repeats=4, seed=2).streams()


def test_the_gap_that_counts_ends_after_the_kill() -> None:
    seen = Seen(0.0, [1.0, 4.0, 4.1, 6.1, 6.2], [1, 2, 3, 4, 5])
    # the three seconds before the kill are not its work
    assert seen.longest_gap_s(4.05) == pytest.approx(2.0)
    assert seen.longest_gap_s(4.2) == pytest.approx(2.0)


def result(whole: bool = True) -> dict[str, Any]:
    tokens = (100, 200, 400)
    return {
        "killed": [{"tokens": n, "gap_s": 0.5 + 0.004 * n, "whole": whole} for n in tokens],
        "undisturbed": [{"tokens": n, "ttft_s": 0.1 + 0.002 * n} for n in tokens],
    }


def test_lines_and_rows(tmp_path: Path) -> None:
    found = fitted(result())
    assert (found[AFTER_A_KILL].slope, found[AFTER_A_KILL].at_zero) == (
        pytest.approx(0.004),
        pytest.approx(0.5),
    )
    assert found[UNDISTURBED].slope == pytest.approx(0.002)
    by_name = {row.name: row for row in rows(result())}
    assert by_name[f"{AFTER_A_KILL}: a token"].ours == pytest.approx(4.0)
    assert by_name[f"{AFTER_A_KILL}: longest"].ours == pytest.approx(2.1)
    assert by_name["of them not whole"].met
    assert not {row.name: row for row in rows(result(whole=False))}["of them not whole"].met
    draw(result(), tmp_path)
    assert (tmp_path / "recompute.png").stat().st_size > 1000


def test_two_streams_are_too_few() -> None:
    few = {name: part[:2] for name, part in result().items()}
    with pytest.raises(ValueError, match="three streams at least"):
        fitted(few)
