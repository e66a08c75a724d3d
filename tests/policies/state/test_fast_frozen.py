"""Tests that the fast constructor builds objects of the frozen dataclass itself."""

import dataclasses

import pytest

from policies.state.fast_frozen import fast_constructor
from policies.state.views import Health, Role, Worker


def test_it_is_the_frozen_class_with_all_that_belongs_to_it() -> None:
    known = Worker("w", Role.DECODE, "g", "n", Health.READY, 8, 1000, slots_used=3, kv_tokens=400)
    made = fast_constructor(Worker)(*(getattr(known, f.name) for f in dataclasses.fields(Worker)))
    assert made == known
    assert hash(made) == hash(known)
    assert type(made) is Worker
    assert made.free_kv_tokens == 600
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.slots_used = 4  # type: ignore[misc]


def test_a_field_too_few_is_refused() -> None:
    with pytest.raises(TypeError):
        fast_constructor(Worker)("w")
