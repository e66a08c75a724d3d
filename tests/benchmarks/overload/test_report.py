"""The report: which aims are met, what stands beside, and that its documents can be made."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overload.load import CLASSES, SLO_S, WEIGHTS
from benchmarks.overload.report import Found, draw, markdown, rows
from benchmarks.overload.sides import OPEN, ROUTER, SIMULATOR, SLUICE

LOADS = (0.8, 1.25, 5.0)


def part(side: str, load: float, **more: Any) -> dict[str, Any]:
    """The figures of a side that meets every aim."""
    found: dict[str, Any] = {
        "round": 0, "side": side, "load": load, "failed": 0, "refused_share": 0.1, "goodput_per_s": 5.0,
        "goodput_tokens_per_s": 400.0 if load > 1 else 320.0, "offered_tokens_per_s": 400.0 * load,
        "refusal_p50_s": 0.002, "refusal_at_arrival_p99_s": 0.004, "late_sending_p99_s": 0.001, "in_time/modest": 1.0,
    }  # fmt: skip
    found |= {f"ttft_p99_s/{name}": 0.9 * slo_s for name, slo_s in SLO_S.items()}
    found |= {f"part_of_share/{tenant}": 1.0 for tenant in WEIGHTS}
    return found | more


def whole(*changed: dict[str, Any], sides: tuple[str, ...] = (SLUICE, OPEN)) -> dict[str, Any]:
    """A result of some sides, in which changed parts stand for those of the same side, load and round."""
    slow = {"goodput_tokens_per_s": 100.0}
    made = [part(side, load, **(slow if side == OPEN else {})) for side in sides for load in LOADS]
    parts = {(one["side"], one["load"], one["round"]): one for one in (*made, *changed)}
    return {
        "config": {"setup": "sim", "rounds": 1},
        "capacity_per_s": 6.67,
        "closed": {},
        "parts": list(parts.values()),
    }


def missed(result: Mapping[str, Any]) -> list[str]:
    return [row.name for row in rows(result) if row.met is False]


def test_all_aims_of_a_side_that_keeps_its_goodput_are_met() -> None:
    found = list(rows(whole()))
    assert missed(whole()) == []
    # by load: goodput, three classes, four tenants, two kinds of refusals; and at 1.25 the goodput of `open`
    assert sum(row.met is True for row in found) == 3 * (1 + 3 + 4 + 2) + 1


@pytest.mark.parametrize(
    ("change", "names"),
    [
        # 94.9 % of the peak, which is 400
        (part(SLUICE, 5.0, goodput_tokens_per_s=379.6), ["load 5: goodput, share of its peak or of what is offered"]),
        # 380 are 95 %
        (part(SLUICE, 5.0, goodput_tokens_per_s=380.0), []),
        # below the capacity only what is offered can be had: 303 of 320 are 94.7 %
        (part(SLUICE, 0.8, goodput_tokens_per_s=303.0), ["load 0.8: goodput, share of its peak or of what is offered"]),
        (
            part(SLUICE, 1.25, **{"ttft_p99_s/batch": 30.1}),
            ["load 1.25: p99 TTFT of the batch requests that were not refused"],
        ),
        (
            part(SLUICE, 5.0, **{"part_of_share/cat": 0.94}),
            ["load 5: part of its fair share that cat (weight 2) gets"],
        ),
        (part(SLUICE, 5.0, refusal_p50_s=0.051), ["load 5: half of all refusals come within"]),
        (part(SLUICE, 5.0, refusal_at_arrival_p99_s=0.2), ["load 5: 99 % of the refusals at the arrival come within"]),
        (
            part(OPEN, 1.25, goodput_tokens_per_s=200.0),
            ["load 1.25: goodput of Sluice, open admission, share of Sluice's"],
        ),
        # no aim concerns the others elsewhere
        (part(OPEN, 5.0, goodput_tokens_per_s=4000.0), []),
    ],
)  # fmt: skip
def test_each_aim_can_be_missed(change: dict[str, Any], names: list[str]) -> None:
    assert missed(whole(change)) == names


def test_a_figure_that_was_not_measured_has_no_row() -> None:
    nothing = {"ttft_p99_s/batch": None, "part_of_share/ant": None, "refusal_p50_s": None}
    names = [row.name for row in rows(whole(part(SLUICE, 5.0, **nothing)))]
    assert not [name for name in names if name.startswith("load 5:") and ("batch" in name or "ant " in name)]
    assert "load 5: half of all refusals come within" not in names


def test_rounds_are_averaged_and_have_an_interval() -> None:
    name = "ttft_p99_s/interactive"
    second = part(SLUICE, 5.0, **{name: 2.4}) | {"round": 1}
    found = Found(whole(second))
    assert found.mean(SLUICE, 5.0, name) == pytest.approx((1.8 + 2.4) / 2)
    (row,) = [r for r in rows(whole(second)) if r.name.startswith("load 5: p99 TTFT of the interactive")]
    # of two values: 12.706 * 0.6 / sqrt(2) / sqrt(2)
    assert row.half_width == pytest.approx(12.706 * 0.3, rel=1e-3)
    # The mean is above the objective, and the interval holds it.
    assert row.met is None


def test_the_others_stand_beside() -> None:
    result = whole(part(ROUTER, 5.0, goodput_tokens_per_s=300.0), sides=(SLUICE, OPEN, ROUTER, SIMULATOR))
    by_name = {row.name: row for row in rows(result)}
    assert by_name["load 5: goodput of vllm-router, bounded, share of Sluice's"].ours == 75.0
    note = by_name["load 5: goodput, share of its peak or of what is offered"].note
    assert "vllm-router, bounded: 75.0%" in note and "Sluice, simulated: 100.0%" in note


def test_the_largest_wait_is_that_of_the_class_that_misses_most() -> None:
    found = Found(whole(part(SLUICE, 5.0, **{"ttft_p99_s/standard": 15.0})))
    assert found.worst_wait(SLUICE, 5.0) == 3.0 and found.worst_wait(SLUICE, 0.8) == pytest.approx(0.9)


def test_the_page_and_the_plot_have_every_side(tmp_path: Path) -> None:
    result = whole(sides=(SLUICE, OPEN, ROUTER, SIMULATOR)) | {"closed": {SLUICE: 5.0}}
    text = markdown(result)
    assert (
        "| 5 | vllm-router, bounded | 400 |" in text
        and "6.67 requests/s; Sluice alone in a closed loop 5.00/s" in text
    )
    assert all(f"p99 TTFT {name}, s" in text for name in CLASSES)
    draw(result, tmp_path, "sim")
    assert (tmp_path / "sim.png").stat().st_size > 1000


def test_a_result_without_sluice_has_no_rows() -> None:
    assert list(rows(whole(sides=(ROUTER,)))) == []
