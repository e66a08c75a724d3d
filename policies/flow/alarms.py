"""Times at which flows must be looked at again: a place that ends, and a rate that allows the next chunk."""

import math
from heapq import heapify, heappop, heappush

from policies.flow.base import Place
from policies.flow.ports import VOID, VOID_LEAST, Held


class Alarms:
    """Two heaps by time with lazy deletion: the ends of places, and the ends of the pauses that a rate imposes."""

    __slots__ = ("_number", "_places", "_rests")

    def __init__(self) -> None:
        self._number = 0
        self._places: list[tuple[float, int, Held, Place]] = []
        self._rests: list[tuple[float, int, Held]] = []

    def place_ends(self, state: Held, place: Place, flows: int) -> None:
        """Remembers when a place ends, if ever. `flows` is the number of flows, which bounds the void entries."""
        if not math.isfinite(place.until_s):
            return
        self._number += 1
        heappush(self._places, (place.until_s, self._number, state, place))
        if len(self._places) > VOID * flows + VOID_LEAST:
            self._places = [entry for entry in self._places if entry[2].place is entry[3]]
            heapify(self._places)

    def rests(self, state: Held) -> None:
        """Remembers a flow whose rate gives it no chunk before `ready_at`."""
        self._number += 1
        heappush(self._rests, (state.ready_at, self._number, state))

    def ended_places(self, now_s: float) -> list[Held]:
        """Returns the flows whose present place has ended, by time."""
        ended = []
        while self._places and self._places[0][0] <= now_s:
            _, _, state, place = heappop(self._places)
            if state.place is place:
                ended.append(state)
        return ended

    def rested(self, now_s: float) -> list[Held]:
        """Returns the flows that may have their next chunk, by time."""
        ready = []
        while self._rests and self._rests[0][0] <= now_s:
            entry = heappop(self._rests)
            if _rests_still(entry):
                ready.append(entry[2])
        return ready

    def next_rested_s(self) -> float | None:
        """Returns the time at which the next flow may have its chunk, None if none rests."""
        while self._rests and not _rests_still(self._rests[0]):
            heappop(self._rests)
        return self._rests[0][0] if self._rests else None


def _rests_still(entry: tuple[float, int, Held]) -> bool:
    at_s, _, state = entry
    return not state.entry and not state.withdrawn and state.waiting > 0 and state.ready_at == at_s
