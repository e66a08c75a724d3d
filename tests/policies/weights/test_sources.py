"""Near engines are named first, and equally near ones in turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.weights.sources import MOST_SOURCES, Source, nearest


def source(engine: str, tier: int | None) -> Source:
    return Source(engine, tier, (f"unix:/{engine}",))


HERE, NEAR, ALSO_NEAR, FAR, UNKNOWN = (
    source("e", 0), source("d", 1), source("c", 1), source("b", 3), source("a", None),
)  # fmt: skip


@pytest.mark.parametrize(
    ("sources", "turn", "named"),
    [
        ([], 5, ""),
        ([UNKNOWN, FAR, NEAR, HERE], 0, "edba"),
        ([NEAR, ALSO_NEAR, FAR], 0, "cdb"),
        ([NEAR, ALSO_NEAR, FAR], 1, "dcb"),
        ([NEAR, ALSO_NEAR, FAR], 2, "cdb"),
        ([UNKNOWN, FAR, NEAR, HERE, ALSO_NEAR], 0, "ecdb"),
    ],
)
def test_order(sources: list[Source], turn: int, named: str) -> None:
    assert "".join(found.engine for found in nearest(sources, turn)) == named


@given(
    tiers=st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=9),
    turn=st.integers(0, 10**6),
    most=st.integers(1, 9),
)
def test_the_nearest_are_named_each_once(tiers: list[int | None], turn: int, most: int) -> None:
    sources = [source(str(i), tier) for i, tier in enumerate(tiers)]
    found = nearest(sources, turn, most)
    assert len(found) == len(set(found)) == min(most, len(sources))

    def far(one: Source) -> int:
        return 9 if one.tier is None else one.tier

    assert [far(one) for one in found] == sorted(map(far, sources))[:most]
    # whatever the turn, and in whatever order they are given
    assert nearest(sources[::-1], turn, most) == found


def test_equals_take_turns() -> None:
    sources = [source(name, 2) for name in "abcdef"]
    firsts = [nearest(sources, turn)[0].engine for turn in range(6)]
    assert sorted(firsts) == list("abcdef")
    assert len(nearest(sources, 0)) == MOST_SOURCES
