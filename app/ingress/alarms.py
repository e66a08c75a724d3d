"""The alarms of the open requests: when each of them has to be woken, because a limit of its time may be over.

Times fall into slots, as in a timer wheel. Setting an alarm costs a few dictionary operations, and a sweep costs only
what is due, however many requests are open; a request that ends takes its alarm with it. A request sets another time at
each stage, and hardly one ever comes. So an alarm is kept for `LOOK_S` from now at the latest, where most requests have
ended before, and it stays there when it is put off; then it is set again.
"""

import heapq
import math

from policies.request.life import Life

LOOK_S = 5.0
"""ASSUMPTION: most requests are shorter. One that lasts sets its alarm again in these intervals."""


class Alarms:
    """At most one alarm for each request. `due` is called about every `slot_s` seconds."""

    def __init__(self, slot_s: float) -> None:
        self._slot_s = slot_s
        self._last = 0
        """The slot `LOOK_S` after the last sweep."""
        self._slots: dict[int, set[Life]] = {}
        self._order: list[int] = []  # a heap of the slots
        self._slot_of: dict[Life, int] = {}

    def __len__(self) -> int:
        return len(self._slot_of)

    def set(self, life: Life, at_s: float) -> None:
        """Sets the alarm of `life` to `at_s`, which is its `wake_at_s`, in place of the one it had; infinity sets
        none.
        """
        before = self._slot_of.get(life)
        slot = min(int(at_s / self._slot_s), self._last) if at_s < math.inf else None
        if before is not None:
            if slot is not None and slot >= before:
                return
            self._slots[before].remove(life)
            del self._slot_of[life]
        if slot is not None:
            lives = self._slots.get(slot)
            if lives is None:
                lives = self._slots[slot] = set()
                heapq.heappush(self._order, slot)
            lives.add(life)
            self._slot_of[life] = slot

    def due(self, now_s: float) -> list[Life]:
        """Removes and returns the requests whose time has come, the earliest slot first. It may come a slot late."""
        until, found = int(now_s / self._slot_s), list[Life]()
        self._last = int((now_s + LOOK_S) / self._slot_s)
        while self._order and self._order[0] < until:
            lives = self._slots.pop(heapq.heappop(self._order))
            for life in lives:
                del self._slot_of[life]
            found += lives
        # it was put off, or by rounding its time seems to have come a moment too early
        for life in found:
            if life.wake_at_s > now_s:
                self.set(life, life.wake_at_s)
        return [life for life in found if life.wake_at_s <= now_s]
