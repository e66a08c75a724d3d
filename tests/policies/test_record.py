"""Tests of what records share with frozen dataclasses."""

import dataclasses
import pickle

import pytest

from policies.record import record
from policies.state.views import Health, Role, Worker


@record
class Point:
    """A record with a default."""

    x: int
    tags: tuple[str, ...] = dataclasses.field(default=())


def test_records_are_compared_and_hashed_by_their_fields() -> None:
    assert Point(1, ("a",)) == Point(1, ("a",)) != Point(1)
    assert len({Point(1), Point(1), Point(2)}) == 2


def test_a_record_has_slots_and_is_a_dataclass() -> None:
    assert dataclasses.replace(Point(1), x=2) == Point(2)
    assert not hasattr(Point(1), "__dict__")
    with pytest.raises(AttributeError):
        Point(1).z = 3  # type: ignore[attr-defined]


def test_a_record_can_be_pickled_and_keeps_its_properties() -> None:
    worker = Worker("w", Role.DECODE, "g", "n", Health.READY, 8, 1000, slots_used=3, kv_tokens=400)
    again = pickle.loads(pickle.dumps(worker))
    assert again == worker
    assert again.free_kv_tokens == 600


def test_a_field_too_few_is_refused() -> None:
    with pytest.raises(TypeError):
        Point()  # type: ignore[call-arg]
