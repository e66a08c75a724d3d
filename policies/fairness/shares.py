"""The counters of the tenants that wait at one place, by class, and those of the classes: the queue before prefill has
one set, the pool another.

    enter     a tenant begins to wait in a class: its counter is lifted to the least of those that wait there, less its
              credit
    leave     none of its requests waits there any more
    charge    adds service to its counter, or takes back what was charged too much

With a `class_ratio` the classes have counters as well, by the same rules, as if each were a tenant: a class waits while
tenants wait in it, and `charge_class` adds the service that it got. Without one a more urgent class always goes first.

Each takes O(log tenants). Of the tenants that do not wait, the last `MOST_IDLE` are remembered, because they may have
had more than their share; what is forgotten begins at the least counter of those that wait.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from policies.fairness.ranking import Ranking
from policies.request.classes import class_weight

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
    before, and got less than its share since, keeps at most `credit` of what it is behind by. `class_ratio` is how many
    times as much service a class gets as one whose priority is larger by 1; None: the more urgent one gets all.
    """

    def __init__(
        self, credit: float = 0.0, most_idle: int = MOST_IDLE, class_ratio: float | None = None
    ) -> None:
        self._credit = credit
        self._class_ratio = class_ratio
        # the classes by their names, which are their priorities, as tenants of one class
        self._by_class: Shares | None = None if class_ratio is None else Shares(credit, most_idle)
        self._most_idle = most_idle
        self._classes: dict[int, _Class] = {}
        self._idle: OrderedDict[tuple[int, str], float] = OrderedDict()
        self.crowded = 0
        """Number of classes in which several tenants wait."""

    @property
    def weighted(self) -> bool:
        """Whether classes have counters."""
        return self._by_class is not None

    @property
    def shared(self) -> bool:
        """Whether there is a turn to be given: several tenants wait in a class, or several classes have counters."""
        return self.crowded > 0 or self.classes > 1

    @property
    def classes(self) -> int:
        """The number of classes that wait, where classes have counters; else 0."""
        return 0 if self._by_class is None else self._by_class.tenants(0)

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
        if self._by_class is not None:
            self._by_class.enter(0, str(priority))

    def leave(self, priority: int, tenant: str) -> None:
        """Notes that a tenant waits no more in a class; one that does not wait is no error."""
        of = self._classes.get(priority)
        if of is None or tenant not in of.waiting:
            return
        of.last, of.last_counter = tenant, of.waiting[tenant]
        of.waiting.discard(tenant)
        self.crowded -= len(of.waiting) == 1
        if self._by_class is not None and not of.waiting:
            self._by_class.leave(0, str(priority))
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

    def charge_class(self, priority: int, service: float) -> None:
        """Adds service to the counter of a class, in weighted tokens; nothing happens where classes have none."""
        if self._by_class is not None and self._class_ratio is not None:
            weight = class_weight(priority, self._class_ratio)
            self._by_class.charge(0, str(priority), service / weight)

    def class_counter(self, priority: int) -> float:
        """Returns the service that a class got, for each unit of its weight; 0 where classes have no counters."""
        return 0.0 if self._by_class is None else self._by_class.counter(0, str(priority))

    def class_end(self, priority: int, cost: float) -> float:
        """Returns the counter that a class will have when it has got service of this cost."""
        weight = 1.0 if self._class_ratio is None else class_weight(priority, self._class_ratio)
        return self.class_counter(priority) + cost / weight

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
        """Returns the classes in which tenants wait: the most urgent one first, or where classes have counters in the
        order of these.
        """
        if self._by_class is not None:
            return self.first_classes(self.classes)
        return sorted([priority for priority, of in self._classes.items() if of.waiting])

    def first(self, priority: int) -> str | None:
        """Returns the tenant whose turn it is in a class; None when none waits."""
        of = self._classes.get(priority)
        return None if of is None else of.waiting.first()

    def first_class(self) -> int | None:
        """Returns the class whose turn it is; None when none waits. Classes have counters."""
        assert self._by_class is not None
        name = self._by_class.first(0)
        return None if name is None else int(name)

    def first_classes(self, most: int) -> list[int]:
        """Returns the first `most` classes in which tenants wait, in the order of their counters, which they have."""
        assert self._by_class is not None
        return [int(name) for name in self._by_class.in_turn(0, most)]

    def in_turn(self, priority: int, most: int) -> list[str]:
        """Returns the first `most` tenants that wait in a class, in the order of their counters."""
        of = self._classes.get(priority)
        return [] if of is None else of.waiting.firsts(most)
