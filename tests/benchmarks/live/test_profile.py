"""Counting py-spy's stacks."""

import pytest

from benchmarks.live.profile import Spot, hot_spots, parse, place

RAW = """main (app/x.py:1);run (uvloop/loop.pyx:10);feed (/a/site-packages/lib/f.py:5) 6
main (app/x.py:1);run (uvloop/loop.pyx:12);feed (/a/site-packages/lib/f.py:7) 2
main (app/x.py:2);main (app/x.py:9) 2
"""


def test_stacks() -> None:
    assert parse(RAW)[2] == (["main (app/x.py:2)", "main (app/x.py:9)"], 2)
    assert sum(count for _, count in parse(RAW)) == 10


def test_functions_by_self_time() -> None:
    assert hot_spots(parse(RAW), by_line=False) == [
        Spot("feed (lib/f.py)", 0.8, 0.8),
        Spot("main (app/x.py)", 0.2, 1.0),  # its recursion counts once
        Spot("run (uvloop/loop.pyx)", 0.0, 0.8),
    ]


def test_lines_by_self_time() -> None:
    spots = hot_spots(parse(RAW), by_line=True)
    assert [(spot.where, spot.self_share) for spot in spots] == [
        ("feed (lib/f.py:5)", 0.6),
        ("feed (lib/f.py:7)", 0.2),
        ("main (app/x.py:9)", 0.2),
        ("main (app/x.py:1)", 0.0),
        ("run (uvloop/loop.pyx:10)", 0.0),
        ("main (app/x.py:2)", 0.0),
        ("run (uvloop/loop.pyx:12)", 0.0),
    ]


@pytest.mark.parametrize(
    ("frame", "by_line", "expected"),
    [
        ("f (a.py:3)", True, "f (a.py:3)"),
        ("f (a.py:3)", False, "f (a.py)"),
        ("C::f(int) (lib.so)", True, "C::f(int) (lib.so)"),
        ("0x7f12", True, "0x7f12"),
    ],
)
def test_places(frame: str, by_line: bool, expected: str) -> None:
    assert place(frame, by_line=by_line) == expected


def test_no_samples() -> None:
    assert hot_spots(parse(""), by_line=True) == []
