"""A rival of the composition: a pool that serves the request of shortest expected output first, before any policy.

    order:   entries that would lose their KV, then by forecast output tokens * sequences, then as they came
    worker:  as the policy inside chooses it for the first entries of this order, as many as there are free slots

So the pool decides who is admitted and the policy decides where, and any part can be measured with the order that the
composition has by its rent (`policies.routing.composition.slot_rent`). It is a rival for experiments and no policy that
an application can name: nothing in it keeps long requests from waiting without end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar
from unittest import mock

from policies.routing import registry
from policies.routing.base import Assignment, DecodePolicy, Feasible, Needs, assign, needs_of
from policies.state.views import PoolEntry, Snapshot

NAME = "shortest_first"


@dataclass(frozen=True)
class ShortestFirst:
    """Offers the policy `inside`, which is built with `params`, the entries of shortest forecast output."""

    paper: ClassVar[str] = "none (a rival)"
    formula: ClassVar[str] = "the cost of the policy inside; the pool by forecast output tokens * sequences"
    needs: ClassVar[Needs] = Needs.LENGTHS
    inside: str = "join_shortest_queue"
    params: Mapping[str, Any] = field(default_factory=dict)
    name: str = NAME

    @cached_property
    def policy(self) -> DecodePolicy:
        """The policy that chooses workers."""
        return registry.decode_policy(self.inside, self.params)

    @property
    def horizon(self) -> int:
        """H of the policy inside, 0 where it reads no forecast of departures."""
        return int(getattr(self.policy, "horizon", 0))

    @property
    def needs_by_params(self) -> Needs:
        return needs_of(self.policy)

    def assign(self, feasible: Feasible, snapshot: Snapshot, rng: random.Random) -> tuple[Assignment, ...]:
        placeable = [(entry, workers) for entry, workers in feasible[:] if workers]
        free = sum({w.id: max(0, w.free_slots) for _, workers in placeable for w in workers}.values())
        ordered = sorted(placeable, key=lambda pair: _key(pair[0], snapshot.now_s))
        return assign(self.policy, ordered[:free], snapshot, rng)


def _key(entry: PoolEntry, now_s: float) -> tuple[bool, float, float]:
    tokens = entry.request.predicted_tokens
    expected = float("inf") if tokens is None else tokens * entry.request.slots
    return (not entry.is_overdue(now_s), expected, entry.entered_s)


@contextmanager
def known() -> Iterator[None]:
    """Lets simulations name the rival, as `shortest_first`, while the context is open."""
    with mock.patch.dict(registry.DECODE, {NAME: ShortestFirst}):
        yield
