"""Tests of the means over pool entries: plain means first, moving means later; an entry without a prediction does not
change the mean length.
"""

import pytest

from policies.state import events as ev
from policies.state.charges import USUAL_OF
from policies.state.pool import TYPICAL_OF, Pool
from policies.state.reducer import ClusterState
from policies.state.views import PoolEntry, Request, Role, TypicalEntry


def add(pool: Pool, number: int, kv_bytes: int, predicted_tokens: float | None) -> None:
    request = Request(f"r{number}", 0.0, 10, 64, predicted_tokens=predicted_tokens)
    pool.add(PoolEntry(request, "p", "g", float(number), 30.0, kv_bytes, 0))


def test_the_first_entries_count_alike() -> None:
    pool = Pool()
    assert pool.typical is None
    for number, (kv_bytes, tokens) in enumerate([(10, None), (20, 100.0), (60, 300.0), (10, None)]):
        add(pool, number, kv_bytes, tokens)
    assert pool.typical == TypicalEntry(pytest.approx(25.0), pytest.approx(200.0))  # type: ignore[arg-type]


def test_without_predictions_there_is_no_typical_length() -> None:
    pool = Pool()
    add(pool, 0, 10, None)
    assert pool.typical == TypicalEntry(10.0, None)


def test_the_usual_output_counts_what_still_runs_and_forgets() -> None:
    state, ended = ClusterState(), 0
    state.apply(ev.EngineUp(0.0, "d", Role.DECODE, "g", "n", 8, 1_000_000))

    def run(attempt_id: str, tokens: int, slots: int = 1) -> None:
        state.apply(
            ev.Adopted(0.0, Request(attempt_id, 0.0, 10, 64, slots), "decoding", None, "d", 0, 0.0, 0)
        )
        state.apply(ev.Progressed(0.0, attempt_id, tokens))

    def end(attempt_id: str) -> float | None:
        state.apply(ev.Closed(0.0, attempt_id, "finished", 0))
        return state.snapshot(0.0).usual_output_tokens

    run("long", 500)
    run("short", 100)
    assert state.snapshot(0.0).usual_output_tokens is None
    assert end("short") == 600.0
    run("pair", 100, slots=2)
    kept = 1 - 1 / USUAL_OF
    assert end("pair") == pytest.approx((600 * kept + 100) / (kept + 2))
    for ended in range(1000):
        run(f"r{ended}", 200)
        last = end(f"r{ended}")
    assert last == pytest.approx(200.0, abs=0.01)
    state.apply(ev.EngineDown(0.0, "d"))
    assert end("long") is not None


def test_old_entries_are_forgotten_and_those_that_left_are_not() -> None:
    pool = Pool()
    for number in range(TYPICAL_OF):
        add(pool, number, 100, 50.0)
        pool.remove(f"r{number}")
    add(pool, TYPICAL_OF, 100 + 64, 50.0 + 64)
    assert pool.typical == TypicalEntry(pytest.approx(101.0), pytest.approx(51.0))  # type: ignore[arg-type]
