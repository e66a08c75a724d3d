"""The hops of a burst's requests are added up by their place in the way, and drawn."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.document import OTHERS
from benchmarks.live.waterfall import draw, hops_of, main, markdown, part_of


def hop(name: str, kind: str, since_ms: float, until_ms: float) -> dict[str, Any]:
    return {"name": name, "process": "x", "kind": kind, "since_s": since_ms / 1e3, "until_s": until_ms / 1e3}


LONG = {
    "attempt_id": "1-a",
    "at_s": 100.0,
    "hops": [
        hop("parse", "work", 0, 1),
        hop("to the router", "wire", 1, 3),
        hop("prefill", "work", 3, 7),
        hop("to the router", "wire", 7, 8),
        hop("wait for a slot", "wait", 8, 10),
    ],
}
SHORT = {
    "attempt_id": "2-a",
    "at_s": 100.001,
    "hops": [hop("parse", "work", 0, 3), hop("to the router", "wire", 3, 7)],
}


def test_hops_of_one_name_are_told_apart_by_their_place_and_missing_ones_count_as_nothing() -> None:
    """The two ways take 10 and 7 ms: 17 in all. The first way to the router takes 2 and 4 ms, the second 1 and none."""
    rows = hops_of([LONG, SHORT])
    assert [(row["name"], row["kind"], row["mean_ms"]) for row in rows] == [
        ("parse", "work", pytest.approx(2.0)),
        ("to the router", "wire", pytest.approx(3.0)),
        ("prefill", "work", pytest.approx(2.0)),
        ("to the router, 2", "wire", pytest.approx(0.5)),
        ("wait for a slot", "wait", pytest.approx(1.0)),
    ]
    assert rows[1]["share"] == pytest.approx(6 / 17)
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)


def test_a_wait_for_a_slot_belongs_to_the_engine_at_which_it_is() -> None:
    wait = hop("wait for a slot", "wait", 0, 1)
    assert part_of(wait, prefilled=False) == "prefill engine, wait"
    assert part_of(wait, prefilled=True) == "decode engine, wait"
    assert part_of(hop("to the router", "wire", 0, 1), prefilled=False) == "wire"
    assert part_of(hop("tokenise", "work", 0, 1), prefilled=False) == "ingress"


def test_what_was_measured_is_shown_drawn_and_documented(tmp_path: Path) -> None:
    case = {
        "clients": 2,
        "requests": 2,
        "ttft_p50_ms": 8.5,
        "ttft_p99_ms": 10.0,
        "ttft_p50_followed_ms": 9.5,
        "hops": hops_of([LONG, SHORT]),
        "last": [LONG, SHORT],
    }
    text = markdown([case])
    assert "work 4.00 ms, wait 1.00 ms, wire 3.50 ms" in text
    assert "| to the router, 2 | wire | 0.500 |" in text
    draw([case], tmp_path / "w.png")
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")
    rows = list(OTHERS["overhead/waterfall.json"].read({"cases": json.loads(json.dumps([case]))}))
    assert [(row.name, row.ours) for row in rows][:3] == [
        ("bursts of 2: TTFT p50", 8.5),
        ("bursts of 2: TTFT p50 where each request is followed", 9.5),
        ("bursts of 2: parse, work, mean", pytest.approx(2.0)),
    ]


def test_one_burst_is_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--bursts", "1"])
    assert ended.value.code == 2 and "two bursts" in capsys.readouterr().err
