"""How long engines have been awaited, and which of them are overdue: no longer counted on.

A replica may never start: no node has the resources for it, or it dies at each start and Serve makes another one in its
place. As long as it counts as starting, the policy takes it for capacity on its way and asks for no other. So an engine
that has been awaited for the limit is overdue until the router knows it, or until it is not wanted any more.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from actors.scaling.fleet import group_of

START_LIMIT_S = 600.0
"""Time after which an engine is overdue, where the configuration names none and no start took half as long.
ASSUMPTION: a cluster has added a node by then, and the node has fetched an image and loaded a large model.
"""
TIMES_LONGEST = 2.0
"""The limit is this many times the longest start, where that is longer. ASSUMPTION: a start that succeeds takes less.
"""


STEP_S = 5.0
"""Most seconds that count between two observations: while there is no router, nobody sees whether engines come.
ASSUMPTION: five observations, as `actors.scaling.server.STALE_S`.
"""


@dataclass(slots=True)
class Waits:
    """For how many seconds each engine has been awaited, as one autoscaler saw it. `configured_s` is the limit; None:
    it follows from the starts that were measured.
    """

    configured_s: float | None = None
    _longest_s: float = 0.0
    _looked_s: float | None = None
    _waited_s: dict[str, float] = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        """The time in seconds after which an engine is overdue."""
        if self.configured_s is not None:
            return self.configured_s
        return max(START_LIMIT_S, TIMES_LONGEST * self._longest_s)

    def started(self, seconds: float) -> None:
        """Takes in how long one engine took to start."""
        self._longest_s = max(self._longest_s, seconds)

    def look(self, awaited: Mapping[str, Sequence[str]], known: Set[str], now_s: float) -> frozenset[str]:
        """Returns the engines that are overdue, of those `awaited` by group; the router knows the `known` ones.

        An engine that is new in a group takes over the longest wait of those that are gone and have not come to the
        router: its replica was made in the place of that one.
        """
        step_s = 0.0 if self._looked_s is None else max(0.0, min(STEP_S, now_s - self._looked_s))
        before = {engine: waited_s + step_s for engine, waited_s in self._waited_s.items()}
        waited: dict[str, float] = {}
        for name, engines in awaited.items():
            old = [engine for engine in engines if engine in before]
            new = [engine for engine in engines if engine not in before]
            gone = [
                waited_s
                for engine, waited_s in before.items()
                if group_of(engine) == name and engine not in engines and engine not in known
            ]
            waited |= {engine: before[engine] for engine in old}
            taken_over = [*sorted(gone, reverse=True), *[0.0] * len(new)]
            waited |= dict(zip(new, taken_over, strict=False))
        self._waited_s, self._looked_s = waited, now_s
        return frozenset(engine for engine, waited_s in waited.items() if waited_s >= self.limit_s)
