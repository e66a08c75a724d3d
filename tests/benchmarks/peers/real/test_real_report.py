"""The report of Sluice beside others on real engines, from samples by hand."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments.base import Row
from benchmarks.peers.real.__main__ import failures
from benchmarks.peers.real.report import COMPARISONS, comparison_of, draw, markdown, rows
from benchmarks.peers.real.rows import CASES, ONE_CASES
from benchmarks.peers.real.sides import COLOCATED, RAY, ROUTER, SIDES, SLUICE, VLLM

FIRST, SECOND = list(CASES)[:2]


def part(number: int, side: str, rate: float, ttft_ms: float, idle: float) -> dict[str, Any]:
    """One side of one round, whose rows all have the same figures."""
    row = {
        "requests": 40,
        "requests_per_s": rate,
        "cpu_ms_per_token": 30.0,
        "cpu_ms": {"prefill/worker": 10.0, "decode/worker": 20.0},
        "other_cores": 0.0,
        "failures": {},
        "ttft_p50_ms": ttft_ms,
        "ttft_p99_ms": 2 * ttft_ms,
        "tpot_p50_ms": 50.0,
    }
    return {
        "round": number,
        "side": side,
        "idle": {"idle_cpu": {"ingress": idle, "gcs": 0.001}, "total": {"pss_bytes": 3 * 2**30}},
        "rows": [{"row": name, **row} for name in comparison_of(side).cases],
    }


def result() -> dict[str, Any]:
    """Two rounds: Sluice has 3 and 6 requests/s, vllm-router 2 and 4, Ray Serve LLM 3 and 3."""
    parts = [
        part(0, SLUICE, 3.0, 100.0, 0.1),
        part(0, ROUTER, 2.0, 50.0, 0.05),
        part(0, RAY, 3.0, 200.0, 0.4),
        part(1, RAY, 3.0, 200.0, 0.4),
        part(1, ROUTER, 4.0, 50.0, 0.05),
        part(1, SLUICE, 6.0, 100.0, 0.1),
    ]
    return {"config": {"rounds": 2}, "parts": parts}


def one_engine(*rates: tuple[float, float]) -> dict[str, Any]:
    """Rounds in which Sluice's one engine and vLLM's own server have these rates."""
    parts = [
        part(number, side, rate, 100.0, 0.1)
        for number, pair in enumerate(rates)
        for side, rate in zip((COLOCATED, VLLM), pair, strict=True)
    ]
    return {"config": {"rounds": len(rates)}, "parts": parts}


def row_of(name: str) -> Row:
    [found] = [row for row in rows(result()) if row.name == name]
    return found


def test_each_side_belongs_to_one_comparison() -> None:
    assert [side for one in COMPARISONS.values() for side in one.sides] == list(SIDES)
    assert comparison_of(VLLM).ours == COLOCATED and comparison_of(RAY).ours == SLUICE


@pytest.mark.parametrize(
    ("rates", "met"),
    [
        # 0.99 in both rounds: the interval has no width
        (((9.9, 10.0), (4.95, 5.0)), True),
        (((9.7, 10.0), (4.85, 5.0)), False),
        # 1.1 and 0.9: the interval of two such rounds holds everything
        (((11.0, 10.0), (4.5, 5.0)), None),
    ],
)
def test_one_engine_has_the_aim_of_98_percent_in_every_row(
    rates: tuple[tuple[float, float], ...], met: bool | None
) -> None:
    found = {row.name: row for row in rows(one_engine(*rates))}
    for name in ONE_CASES:
        row = found[f"{name}: requests/s, Sluice / vLLM's own server beside an idle Ray"]
        assert (row.aim, row.met) == ("at least 0.98", met) and row.half_width is not None
    assert sum(bool(row.aim) for row in found.values()) == len(ONE_CASES)
    text = markdown(one_engine(*rates))
    assert "## One engine: ratios" in text and "One prefill and one decode" not in text


def test_ratios_are_paired_by_round_and_compared_with_their_aims() -> None:
    rate = row_of(f"{SECOND}: requests/s, Sluice / vllm-router, two vLLM servers")
    assert (rate.ours, rate.aim, rate.met) == (pytest.approx(1.5), "at least 1", True)
    ray = row_of(f"{SECOND}: requests/s, Sluice / Ray Serve LLM")
    # 3/3 and 6/3: the interval of two such rounds holds everything
    assert (ray.ours, ray.met) == (pytest.approx(2**0.5), None)
    ttft = row_of(f"{FIRST}: TTFT p50, Sluice / vllm-router, two vLLM servers")
    assert (ttft.ours, ttft.aim, ttft.met) == (pytest.approx(2.0), "at most 1", False)
    # one client at a time: its rate is its time, which has an aim already
    assert row_of(f"{FIRST}: requests/s, Sluice / Ray Serve LLM").aim == ""


def test_a_side_without_load_is_compared_too() -> None:
    idle = row_of("cores that are busy without load, Sluice / Ray Serve LLM")
    assert idle.ours == pytest.approx(0.101 / 0.401)
    assert row_of("memory (PSS) of all processes, Sluice / Ray Serve LLM").ours == pytest.approx(1.0)


def test_the_tables_have_all_sides_and_the_processes_that_are_busy_without_load() -> None:
    text = markdown(result())
    assert f"| {FIRST} | Ray Serve LLM | 3 | 200 | 400 | 50 | 30 |" in text
    assert "| Sluice | all | 0.101 |" in text
    assert "| Sluice | ingress | 0.100 |" in text and "| Sluice | gcs |" not in text
    assert "| at most 1 | missed |" in text


def test_the_plot_is_drawn_also_without_a_side(tmp_path: Path) -> None:
    draw(result(), tmp_path, "real")
    whole = one_engine((9.9, 10.0))
    whole["parts"] = [one for one in whole["parts"] if one["side"] == VLLM]
    draw(whole, tmp_path, "alone")
    for name in ("real", "alone"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_failures_name_the_side_and_the_row() -> None:
    whole = result()
    whole["parts"][1]["rows"][0]["failures"] = {"status 500": 2}
    whole["parts"][4]["rows"][0]["failures"] = {"status 500": 1}
    assert failures(whole) == {f"vllm-router, two vLLM servers, {FIRST}: status 500": 3}
