"""Processor sharing of a link: staggered arrivals by hand, early leavers, and conservation of bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.sim.links import SharedLink


def ends(link: SharedLink) -> dict[str, float]:
    found = {}
    while link.next_end_s() is not None:
        key, end_s = link.end_next()
        found[key] = end_s
    return found


def test_staggered_arrivals() -> None:
    """100 B/s. a: 300 B at 0; b: 100 B at 1. a alone to 1 (100 B), both at 50 B/s to 3 (b ends), a's last 100 to 4."""
    link = SharedLink(100.0)
    link.begin("a", 300, 0.0)
    link.begin("b", 100, 1.0)
    assert ends(link) == {"b": pytest.approx(3.0), "a": pytest.approx(4.0)}


def test_who_leaves_gives_its_share_back() -> None:
    """a: 300 B at 0, b: 1000 B at 0, b leaves at 2: a had 100 B by then, the other 200 B take 2 s more."""
    link = SharedLink(100.0)
    link.begin("a", 300, 0.0)
    link.begin("b", 1000, 0.0)
    link.drop("b", 2.0)
    link.drop("unknown", 2.0)
    assert ends(link) == {"a": pytest.approx(4.0)}


def test_idle_time_serves_nobody() -> None:
    link = SharedLink(100.0)
    link.begin("a", 100, 0.0)
    assert ends(link) == {"a": pytest.approx(1.0)}
    link.begin("b", 100, 50.0)
    assert ends(link) == {"b": pytest.approx(51.0)}


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 10_000)), min_size=1, max_size=30))
def test_bytes_are_conserved_over_every_busy_period(arrivals: list[tuple[float, int]]) -> None:
    """Work conservation: the last end of a busy period is its start + all its bytes / bandwidth."""
    rate, now_s, free_s = 1000.0, 0.0, 0.0
    link, last_s = SharedLink(rate), 0.0
    for i, (gap_s, n_bytes) in enumerate(arrivals):
        now_s += gap_s
        while (end_s := link.next_end_s()) is not None and end_s <= now_s:
            last_s = link.end_next()[1]
        link.begin(f"r{i}", n_bytes, now_s)
        free_s = max(free_s, now_s) + n_bytes / rate
    last_s = max(last_s, *ends(link).values())
    assert last_s == pytest.approx(free_s)
