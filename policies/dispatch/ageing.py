"""Ageing: a request that has waited long is served as one of the next more urgent class (`class_ageing_s`).

The queue and the pool have a watch each. At a tick the dispatcher asks it for the requests that have waited long
enough, and raises each to the next more urgent class in which something waits at the same place. It does so again after
each further such time, so that nobody waits for more than this time in each class, and for what waits before it in
each. What waits in the most urgent class is not looked at, so a tick costs what it raises.

A raised request is the last of its new class in the queue. In the pool its place is by when it came there.
"""

import heapq
from collections.abc import Callable, Iterable
from itertools import pairwise

from policies.state.views import Request, RequestId

Since = Callable[[RequestId], tuple[Request, float] | None]
"""A function that returns a request that waits, and since when; None if it does not wait."""

_Watched = tuple[float, int, Request, float]
"""(when it has waited long enough, a number, the request, since when it waits). The numbers are all different."""


class AgeWatch:
    """The requests that wait at one place, by class and by when they have waited long enough. Those that have left are
    dropped when they come first or are the majority.
    """

    def __init__(self, since: Since) -> None:
        self._since = since
        self._n = 0
        self._of: dict[int, list[_Watched]] = {}  # heaps
        self._watched = 0

    def restart(self, waiting: Iterable[tuple[Request, float]], age_s: float | None) -> None:
        """Starts again with all that wait, and since when; with None nothing is watched."""
        self._of, self._watched = {}, 0
        if age_s is not None:
            for request, since_s in waiting:
                self.add(request, since_s, since_s + age_s)

    def add(self, request: Request, since_s: float, due_s: float) -> None:
        """Starts to watch a request that waits since `since_s`, and has waited long enough at `due_s`."""
        self._n += 1
        of = self._of.setdefault(request.terms.priority, [])
        heapq.heappush(of, (due_s, self._n, request, since_s))
        self._watched += 1

    def due(self, now_s: float, priorities: list[int], most: int) -> list[tuple[Request, float, int]]:
        """Returns requests that have waited long enough, since when each waits, and the next more urgent one of
        `priorities`, which are those in which something waits, ascending. They are no longer watched. At most `most`
        are looked at.
        """
        found: list[tuple[Request, float, int]] = []
        for above, priority in pairwise(priorities):
            of = self._of.get(priority, [])
            while of and most and of[0][0] <= now_s:
                _, _, request, since_s = heapq.heappop(of)
                self._watched -= 1
                most -= 1
                if self._waits(request, since_s):
                    found.append((request, since_s, above))
        return found

    def tidy(self, waiting: int) -> None:
        """Drops those that have left if they are the majority; `waiting` requests wait."""
        if self._watched <= 1024 + 4 * waiting:
            return
        for priority, of in list(self._of.items()):
            kept = [one for one in of if self._waits(one[2], one[3])]
            heapq.heapify(kept)
            self._of[priority] = kept
            if not kept:
                del self._of[priority]
        self._watched = sum(len(of) for of in self._of.values())

    def _waits(self, request: Request, since_s: float) -> bool:
        """Whether a request waits as it did when it was added: a raised one is another object."""
        waits = self._since(request.attempt_id)
        return waits is not None and waits[0] is request and waits[1] == since_s
