"""Tests that a worker's departures equal the formula, whenever its requests grow and whenever they are read."""

import math

from hypothesis import given
from hypothesis import strategies as st

from policies.state.charges import Departures, Growth, LiveRequest
from policies.state.views import Departure, Request

REQUESTS = st.lists(
    st.tuples(st.integers(1, 100), st.integers(1, 2), st.floats(0, 40)), min_size=1, max_size=12
)
# each step: the requests that grow (a bit each), by how many tokens, whether the departures are read, and the index of
# a request that is removed before (if there is one)
GROWTHS = st.lists(
    st.tuples(st.integers(0, 2**12 - 1), st.integers(0, 5), st.booleans(), st.integers(0, 30)), max_size=12
)


def by_formula(lives: list[LiveRequest]) -> tuple[Departure, ...]:
    gone: dict[int, list[tuple[int, int]]] = {}
    for live in lives:
        assert live.finishes_at_tokens is not None
        step = max(1, math.ceil(live.finishes_at_tokens - live.tokens / live.request.slots))
        gone.setdefault(step, []).append((live.request.slots, live.request.prompt_tokens + live.tokens))
    return tuple(
        Departure(step, sum(k for k, _ in who), sum(kv for _, kv in who))
        for step, who in sorted(gone.items())
    )


@given(REQUESTS, GROWTHS)
def test_departures_follow_the_formula(requests: list[tuple[int, int, float]], steps) -> None:  # type: ignore[no-untyped-def]
    departures = Departures()
    lives = []
    for i, (prompt_tokens, slots, at_tokens) in enumerate(requests):
        lives.append(
            LiveRequest(Request(f"r{i}", 0.0, prompt_tokens, 99, slots), finishes_at_tokens=at_tokens)
        )
        departures.book(lives[-1], +1)
    for who, more, looks, off in steps:
        if off < len(lives):
            departures.book(lives.pop(off), -1)
        growths: list[Growth] = []
        for i, live in enumerate(lives):
            if who >> i & 1:
                growths.append((live, live.tokens, live.tokens + more))
                live.tokens += more
        if growths:
            departures.grew(growths)
        if looks:
            assert departures.view() == by_formula(lives)
    assert departures.view() == by_formula(lives)
    for live in lives:
        departures.book(live, -1)
    assert departures.view() == ()
