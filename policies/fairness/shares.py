"""The counters of the tenants that wait at one place, by class: the queue before prefill has one set, the pool another.

    enter     a tenant begins to wait in a class: its counter is lifted to the least of those that wait there, less its
              credit
    leave     none of its requests waits there any more
    charge    adds service to its counter, or takes back what was charged too much

Each takes O(log tenants). Of the tenants that do not wait, the last `MOST_IDLE` are remembered, because they may have
had more than their share; what is forgotten begins at the least counter of those that wait.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from policies.fairness.ranking import Ranking

MOST_IDLE = 4096
"""Most tenants that are remembered although nothing of theirs waits, over all classes. ASSUMPTION: more than have
requests under way at a time, at 0.3 kB each.
"""


@dataclass(slots=True)
class _Class:
    """The tenants of one class: those that wait by their counters, the number of idle ones that are remembered, and
    with which counter the last one has left.
    """

    waiting: Ranking = field(default_factory=Ranking)
    idle: int = 0
    last: str = ""
    last_counter: float = 0.0


class Shares:
    """The counters at one place. A tenant that was never seen, or was forgotten, has the counter 0. One that waited
    before, and got less than its share since, keeps at most `credit` of what it is behind by.
    """

    def __init__(self, credit: float = 0.0, most_idle: int = MOST_IDLE) -> None:
        self._credit = credit
        self._most_idle = most_idle
        self._classes: dict[int, _Class] = {}
        self._idle: OrderedDict[tuple[int, str], float] = OrderedDict()
        self.crowded = 0
        """Number of classes in which several tenants wait."""

    @property
    def waiting(self) -> int:
        """Number of tenants that wait, each once for every class in which it does."""
        return sum([len(one.waiting) for one in self._classes.values()])

    @property
    def remembered(self) -> int:
        """Number of tenants that are remembered although nothing of theirs waits."""
        return len(self._idle)

    def enter(self, priority: int, tenant: str) -> None:
        """Notes that a tenant waits in a class; one that does so already is no error."""
        of = self._classes.get(priority)
        if of is None:
            of = self._classes[priority] = _Class()
        if tenant in of.waiting:
            return
        counter = self._idle.pop((priority, tenant), None)
        of.idle -= counter is not None
        first = of.waiting.first()
        lifted = of.last_counter if first is None else of.waiting[first]
        of.waiting.set(tenant, lifted if counter is None else max(counter, lifted - self._credit))
        self.crowded += len(of.waiting) == 2

    def leave(self, priority: int, tenant: str) -> None:
        """Notes that a tenant waits no more in a class; one that does not wait is no error."""
        of = self._classes.get(priority)
        if of is None or tenant not in of.waiting:
            return
        of.last, of.last_counter = tenant, of.waiting[tenant]
        of.waiting.discard(tenant)
        self.crowded -= len(of.waiting) == 1
        self._idle[priority, tenant] = of.last_counter
        of.idle += 1
        while len(self._idle) > self._most_idle:
            (forgotten, _), _ = self._idle.popitem(last=False)
            was_in = self._classes[forgotten]
            was_in.idle -= 1
            if not was_in.idle and not was_in.waiting:
                del self._classes[forgotten]

    def charge(self, priority: int, tenant: str, service: float) -> None:
        """Adds service, in weighted tokens for each unit of weight. For a tenant that was forgotten nothing happens."""
        of = self._classes.get(priority)
        if of is None or not service:
            return
        if tenant in of.waiting:
            of.waiting.set(tenant, of.waiting[tenant] + service)
        elif (priority, tenant) in self._idle:
            counter = self._idle[priority, tenant] = self._idle[priority, tenant] + service
            if tenant == of.last:
                of.last_counter = counter

    def counter(self, priority: int, tenant: str) -> float:
        """Returns the service that a tenant got in a class, with what it was lifted by."""
        of = self._classes.get(priority)
        if of is not None and tenant in of.waiting:
            return of.waiting[tenant]
        return self._idle.get((priority, tenant), 0.0)

    def tenants(self, priority: int) -> int:
        """Returns the number of tenants that wait in a class."""
        of = self._classes.get(priority)
        return 0 if of is None else len(of.waiting)

    def priorities(self) -> list[int]:
        """Returns the classes in which tenants wait, the most urgent one first."""
        return sorted([priority for priority, of in self._classes.items() if of.waiting])

    def first(self, priority: int) -> str | None:
        """Returns the tenant whose turn it is in a class; None when none waits."""
        of = self._classes.get(priority)
        return None if of is None else of.waiting.first()

    def in_turn(self, priority: int, most: int) -> list[str]:
        """Returns the first `most` tenants that wait in a class, in the order of their counters."""
        of = self._classes.get(priority)
        return [] if of is None else of.waiting.firsts(most)
