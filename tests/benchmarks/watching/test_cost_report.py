"""The report of what watching costs: figures by hand, aims that are met, missed or open, and the plot."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments.base import Row
from benchmarks.seeds import met
from benchmarks.watching.cost import ORDERS
from benchmarks.watching.cost_report import BOARD, NOBODY, PAGES, STATES, TRACED, draw, rows, table

RATES = {NOBODY: (100.0, 200.0), BOARD: (99.0, 198.0), PAGES: (98.0, 196.0), TRACED: (100.0, 200.0)}
"""Requests/s of both rounds: a dashboard takes 1 % of them, three pages 2 %, traces nothing."""
TTFT_MS = {NOBODY: (4.0, 8.0), BOARD: (4.0, 8.0), PAGES: (4.25, 8.25), TRACED: (4.0, 8.5)}


def result() -> dict[str, Any]:
    rounds = [
        {
            "samples": [
                {
                    "round": number,
                    "row": row,
                    "state": state,
                    "requests_per_s": RATES[state][number],
                    "ttft_mean_ms": TTFT_MS[state][number],
                    "ttft_p50_ms": TTFT_MS[state][number],
                    "hot_cpu_ms": 2.0 if state == PAGES else 1.0,
                }
                for row in ("c=1", "c=32")
                for state in RATES
            ]
        }
        for number in range(2)
    ]
    shares = {0: (0.005, 0.006, 0.007), 3: (0.01, 0.02, 0.03)}
    windows = [
        {"pages": pages, "share": share, "rss_bytes": 150_000_000 + pages, "pss_bytes": 90_000_000}
        for pages, own in shares.items()
        for share in own
    ]
    return {"rounds": rounds, "many": {"engines": 64, "windows": windows}}


def row_of(name: str) -> Row:
    [found] = [row for row in rows(result()) if row.name == name]
    return found


def test_ratios_are_paired_by_round_and_compared_with_their_aims() -> None:
    ratio = row_of("c=32, a dashboard, three pages: requests/s over those of nobody watching")
    assert ratio.ours == pytest.approx(0.98)
    assert ratio.half_width == pytest.approx(0.0, abs=1e-9)
    assert (ratio.aim, ratio.met) == ("at least 0.99", False)
    traced = row_of("c=32, 1 % of traces, no dashboard: requests/s over those of nobody watching")
    assert (traced.ours, traced.met) == (pytest.approx(1.0), True)
    # the aims are about pages and traces under a load, and about a request that is alone
    assert row_of("c=32, a dashboard, no page: requests/s over those of nobody watching").aim == ""
    assert row_of("c=1, a dashboard, three pages: requests/s over those of nobody watching").aim == ""
    cpu = row_of(
        "c=1, a dashboard, three pages: CPU of ingress and router a request, over that of nobody watching"
    )
    assert cpu.ours == pytest.approx(2.0)


def test_added_ttft_is_the_difference_by_round() -> None:
    added = row_of("c=1, a dashboard, three pages: added TTFT mean")
    assert (added.ours, added.unit, added.aim, added.met) == (0.25, "ms", "at most 0.1", False)
    # 0 and 0.5 ms: mean 0.25, deviation 0.5 / sqrt 2, half width 12.706 * deviation / sqrt 2
    traced = row_of("c=1, 1 % of traces, no dashboard: added TTFT mean")
    assert traced.ours == 0.25
    assert traced.half_width == pytest.approx(12.7062 * 0.5 / math.sqrt(2) / math.sqrt(2), rel=1e-4)


def test_the_dashboard_at_many_engines() -> None:
    share = row_of("64 engines, 3 pages: CPU of the dashboard, of one core")
    assert (share.ours, share.unit) == (pytest.approx(2.0), "%")
    # 1, 2 and 3 %: the interval is 2 +- 4.303 / sqrt 3, which holds the aim
    assert share.half_width == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert share.met is None
    memory = row_of("64 engines, 3 pages: memory of the dashboard (RSS), greatest")
    assert (memory.ours, memory.met) == (pytest.approx(150.000003), True)
    assert "| open |" in table(list(rows(result())))


@pytest.mark.parametrize(
    ("low", "high", "limits", "expected"),
    [
        (0.991, 1.0, {"least": 0.99}, True),
        (0.97, 0.989, {"least": 0.99}, False),
        (0.98, 1.0, {"least": 0.99}, None),
        (-0.2, 0.1, {"most": 0.1}, True),
        (0.11, 0.2, {"most": 0.1}, False),
        (0.05, 0.2, {"most": 0.1}, None),
    ],
)
def test_an_aim_is_met_or_missed_only_where_the_whole_interval_says_so(
    low: float, high: float, limits: dict[str, float], expected: bool | None
) -> None:
    assert met(low, high, **limits) is expected


def test_a_round_with_one_state_only_gives_no_ratio() -> None:
    whole = result()
    for part in whole["rounds"]:
        part["samples"] = [one for one in part["samples"] if one["state"] != TRACED]
    assert not any(STATES[TRACED] in row.name for row in rows(whole))


def test_every_order_has_all_states_and_turns_the_dashboard_on_or_off_once() -> None:
    for order in ORDERS:
        assert set(order) == {NOBODY, BOARD, PAGES}
        on = [state != NOBODY for state in order]
        assert sum(a is not b for a, b in itertools.pairwise(on)) == 1
    assert {order[0] for order in ORDERS} == {NOBODY, BOARD, PAGES}


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    draw(result(), tmp_path, "cost")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
