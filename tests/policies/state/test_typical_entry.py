"""Tests of the means over pool entries: plain means first, moving means later; an entry without a prediction does not
change the mean length.
"""

import pytest

from policies.state.pool import TYPICAL_OF, Pool
from policies.state.views import PoolEntry, Request, TypicalEntry


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


def test_old_entries_are_forgotten_and_those_that_left_are_not() -> None:
    pool = Pool()
    for number in range(TYPICAL_OF):
        add(pool, number, 100, 50.0)
        pool.remove(f"r{number}")
    add(pool, TYPICAL_OF, 100 + 64, 50.0 + 64)
    assert pool.typical == TypicalEntry(pytest.approx(101.0), pytest.approx(51.0))  # type: ignore[arg-type]
