"""Series and heat strips are bounded, and a time without a value is null."""

import tracemalloc

import pytest

from app.dashboard.rings import BIN_S, BINS, HeatStrips, Rings, quantile


def test_a_series_that_comes_later_is_null_before_and_one_that_ends_is_forgotten() -> None:
    rings = Rings(keep=3)
    rings.add(1.0, {"a": 1.0})
    rings.add(2.0, {"a": 2.0, "b": 5.0})
    assert rings.shown() == {"t": [1.0, 2.0], "a": [1.0, 2.0], "b": [None, 5.0]}
    for at in (3.0, 4.0, 5.0):
        rings.add(at, {"a": at})
    assert rings.shown() == {"t": [3.0, 4.0, 5.0], "a": [3.0, 4.0, 5.0]}


def test_a_heat_strip_has_the_means_of_its_bins() -> None:
    heat = HeatStrips()
    for second in range(25):
        heat.add(1000.0 + second, {"e": (0.5 if second < 10 else 1.0, 0.25)})
    shown = heat.shown(["e", "unknown"])
    assert len(shown["t"]) == BINS
    assert shown["t"][-2:] == [1010.0, 1020.0]
    assert set(shown["engines"]) == {"e"}
    assert shown["engines"]["e"]["running"][-3:] == [None, 0.5, 1.0]
    assert shown["engines"]["e"]["kv"][-1] == 0.25


@pytest.mark.parametrize("away_bins", [3, BINS + 7])
def test_bins_in_which_nothing_was_reported_are_null(away_bins: int) -> None:
    heat = HeatStrips()
    heat.add(1000.0, {"e": (1.0, 1.0)})
    heat.add(1000.0 + away_bins * BIN_S, {"e": (0.0, 0.0)})
    running = heat.shown(["e"])["engines"]["e"]["running"]
    expected: list[float | None] = [None] * BINS
    if away_bins <= BINS:
        expected[-away_bins] = 1.0
    assert running == expected


def test_an_engine_that_has_gone_has_no_strip() -> None:
    heat = HeatStrips()
    heat.add(1000.0, {"e": (1.0, 1.0)})
    heat.add(1001.0, {})
    assert heat.shown(["e"])["engines"] == {}


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3.0], 0.95, 3.0), ([1.0, 2.0], 0.5, 1.5), ([0.0, 1.0, 2.0, 3.0, 4.0], 0.95, 3.8)],
)
def test_quantile(values: list[float], share: float, expected: float | None) -> None:
    assert quantile(values, share) == (None if expected is None else pytest.approx(expected))


def test_a_series_that_pauses_for_less_than_the_ring_is_kept_with_its_place() -> None:
    rings = Rings(keep=4)
    for second in range(7):
        rings.add(float(second), {"a": second} if second in (0, 2, 4) else {"b": -0.5})
    assert rings.shown() == {
        "t": [3.0, 4.0, 5.0, 6.0], "a": [None, 4.0, None, None], "b": [-0.5, None, -0.5, -0.5],
    }  # fmt: skip


def test_a_ring_takes_eight_bytes_for_a_value() -> None:
    rings = Rings(keep=900)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for second in range(1000):
            rings.add(float(second), {f"series {n}": second + n / 7 for n in range(50)})
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 51 * 900 * 8 * 1.1 + 20_000
