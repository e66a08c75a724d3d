"""How far the prompt pool is looked at by one event, so that neither a backlog nor a storm of events costs more than
its bound (`policies.dispatch.dispatcher` says when it is looked at).

Room came: through the whole pool from the front, `tick_entries` of it an event; more urgent entries, starving ones and
more room on the way bring it back to the front. Else only the entries that came are looked at, where no starving one
forbids it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from policies.dispatch.config import DispatchConfig
from policies.state.reducer import ClusterState, PoolKey, pool_key
from policies.state.views import PoolEntry


class Placed(NamedTuple):
    """How an assignment of entries ended: at its bound; with a slot left; at a starving entry that fits nowhere."""

    bounded: bool
    open: bool
    blocked: bool


Place = Callable[[list[PoolEntry]], Placed]
"""Sends off what it can of the entries."""


@dataclass(slots=True)
class _Look:
    """How far the pool has been looked at since room came."""

    unfinished: bool = False  # a bound stopped it: the next event goes on
    behind: PoolKey | None = None  # entries up to this one fit nowhere
    oldest_s: float = float("inf")  # when the oldest of those came
    again: bool = False  # more room came on the way: once more from the front after this
    blocked: bool = False  # over, a starving entry holds the others back
    left_pool: int = 0  # entries that had left the pool by then


class PoolLook:
    """`look` for every event, where the pool is not empty."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._look = _Look()

    def unblocked(self) -> bool:
        """The starving entry that held the others back has left, or another one has: it is worth another look."""
        return self._look.blocked and self._look.left_pool != self._state.left_pool

    def look(
        self, room_came: bool, entered: list[PoolEntry], now_s: float, config: DispatchConfig, place: Place
    ) -> None:
        """Has those entries placed that may fit now; `entered` are those that came with this event."""
        if room_came or self._look.unfinished:
            self._through(room_came, entered, now_s, config, place)
        elif entered:
            self._at_new(entered, now_s, config, place)

    def _through(
        self, room_came: bool, entered: list[PoolEntry], now_s: float, config: DispatchConfig, place: Place
    ) -> None:
        """Most urgent first, as far as the bounds go; the next event goes on from there."""
        look, most = self._look, config.tick_entries
        if look.behind is not None:
            starved = now_s - look.oldest_s > config.starvation_s
            if starved or any(pool_key(entry) < look.behind for entry in entered):
                look = self._look = _Look()
            look.again |= room_came and look.behind is not None
        look.unfinished = True  # until it is known better; a policy may raise
        entries = self._state.waiting(look.behind, most)
        placed = place(entries)
        if placed.bounded:
            return
        if placed.open and not placed.blocked and len(entries) == most:
            look.behind = pool_key(entries[-1])
            look.oldest_s = min(look.oldest_s, min(entry.entered_s for entry in entries))
        else:
            self._look = _Look(look.again, blocked=placed.blocked, left_pool=self._state.left_pool)

    def _at_new(
        self, entered: Sequence[PoolEntry], now_s: float, config: DispatchConfig, place: Place
    ) -> None:
        """Nothing that waited before fits anywhere: only the new entries may, as far as no starving one forbids it."""
        before_s = now_s - config.starvation_s
        starving = [key for key in self._state.oldest_of_each_priority() if key[1] < before_s]
        ordered = sorted((e for e in entered if not starving or pool_key(e) < starving[0]), key=pool_key)
        placed = place(ordered[: config.tick_entries])
        self._look.unfinished = placed.bounded or len(ordered) > config.tick_entries
