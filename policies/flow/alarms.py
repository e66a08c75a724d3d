"""Times at which flows must be looked at again: a place that ends, a rate that allows the next chunk, and a chunk that
may be late.
"""

import math
from collections import deque
from heapq import heapify, heappop, heappush

from policies.flow.base import Place
from policies.flow.ports import VOID, VOID_LEAST, Held, OpenPermit


class Alarms:
    """Two heaps by time and a queue, with lazy deletion: the ends of places, the ends of the pauses that a rate
    imposes, and looks at posted chunks.
    """

    __slots__ = ("_looks", "_most_looks", "_number", "_places", "_rests")

    def __init__(self) -> None:
        self._number = 0
        self._places: list[tuple[float, int, Held, Place]] = []
        self._rests: list[tuple[float, int, Held]] = []
        self._looks: deque[tuple[float, int, Held, OpenPermit]] = deque()
        self._most_looks = VOID_LEAST

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

    def look(self, state: Held, permit: OpenPermit, at_s: float) -> None:
        """Remembers to look at a flow's posted chunk at `at_s`, which never falls from one call to the next."""
        self._number += 1
        permit.look = self._number
        self._looks.append((at_s, self._number, state, permit))
        if len(self._looks) > self._most_looks:
            self._looks = deque(entry for entry in self._looks if entry[3].look == entry[1])
            self._most_looks = VOID * len(self._looks) + VOID_LEAST

    def due_looks(self, now_s: float) -> list[tuple[Held, OpenPermit]]:
        """Returns the posted chunks that must be looked at, with their flows, by time."""
        due = []
        while self._looks and self._looks[0][0] <= now_s:
            _, number, state, permit = self._looks.popleft()
            if permit.look == number:
                due.append((state, permit))
        return due

    def next_s(self) -> float | None:
        """Returns the time at which the next flow may have its chunk, or the next chunk must be looked at; None if no
        flow rests and no chunk is posted.
        """
        while self._rests and not _rests_still(self._rests[0]):
            heappop(self._rests)
        while self._looks and self._looks[0][3].look != self._looks[0][1]:
            self._looks.popleft()
        rested_s = self._rests[0][0] if self._rests else math.inf
        look_s = self._looks[0][0] if self._looks else math.inf
        return min(rested_s, look_s) if self._rests or self._looks else None


def _rests_still(entry: tuple[float, int, Held]) -> bool:
    at_s, _, state = entry
    return not state.entry and not state.withdrawn and state.waiting > 0 and state.ready_at == at_s
