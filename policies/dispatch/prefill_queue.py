"""The queue of requests that wait for a prefill worker: by class, then by the tenant's counter, then by arrival.

A class is a priority. The fairness policy says whose a request is and which tenant has its turn (`policies.fairness`);
with `none`, and before requests of several tenants have come, all are one tenant's. A request that is set aside keeps
its place, but is not the head: it lets the others pass until `call_back`.
"""

import math
from bisect import bisect_left, insort
from collections import OrderedDict

from policies.fairness.base import FairnessPolicy
from policies.fairness.none import NoFairness
from policies.fairness.ranking import Ranking
from policies.fairness.shares import Shares
from policies.state.views import Request, RequestId


class _Line:
    """The requests of one tenant in one class, oldest first: all of them, and those that are not set aside, which is
    the same object as long as none is. `cost` is what they count for together, and `weight` the tenant's by its newest
    request.
    """

    __slots__ = ("cost", "every", "ready", "weight")

    def __init__(self) -> None:
        self.every: OrderedDict[RequestId, Request] = OrderedDict()
        self.ready = self.every
        self.cost, self.weight = 0.0, 1.0


class PrefillQueue:
    """The queue. The head, the newest and the least urgent request are found in O(log tenants).

    Without `shares` all requests are those of one tenant, whose name is "".
    """

    def __init__(self, policy: FairnessPolicy | None = None, shares: Shares | None = None) -> None:
        self.begin(policy, shares)

    def begin(self, policy: FairnessPolicy | None = None, shares: Shares | None = None) -> None:
        """Begins anew with an empty queue."""
        self._policy = policy or NoFairness()
        self._shares = shares
        self._waiting: dict[RequestId, tuple[Request, float]] = {}  # with its cost
        self._aside: set[RequestId] = set()
        self._lines: dict[int, dict[str, _Line]] = {}
        self._classes: list[int] = []  # of lines, ascending
        # in each class the tenants by when their last request would be served, the last one first
        self._ends: dict[int, Ranking] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tenants(self) -> int:
        """The number of tenants that wait, once for each class."""
        return sum([len(lines) for lines in self._lines.values()])

    def tenant(self, request: Request) -> str:
        """Returns the name of the tenant in whose line a request waits."""
        return "" if self._shares is None else self._policy.tenant(request)

    def push(self, request: Request, cost: float = 0.0) -> None:
        """Appends a request as the last of its tenant in its class. It replaces a request of the same attempt_id.
        `cost` is what it is expected to count for.
        """
        attempt_id = request.attempt_id
        if attempt_id in self._waiting:
            self._take_out(attempt_id)
        self._waiting[attempt_id] = request, cost
        priority, tenant = request.terms.priority, self.tenant(request)
        lines = self._lines.get(priority)
        if lines is None:
            lines = self._lines[priority] = {}
            insort(self._classes, priority)
        line = lines.get(tenant)
        if line is None:
            line = lines[tenant] = _Line()
        if self._shares is not None:
            if not line.ready:
                self._shares.enter(priority, tenant)
            line.cost += cost
            line.weight = request.terms.weight
            self._rank(priority, tenant, line)
        line.every[attempt_id] = request
        if line.ready is not line.every:
            line.ready[attempt_id] = request

    def remove(self, attempt_id: RequestId) -> None:
        """Removes a request; an id that is not in the queue is no error."""
        if attempt_id in self._waiting:
            self._take_out(attempt_id)
            del self._waiting[attempt_id]

    def _take_out(self, attempt_id: RequestId) -> None:
        request, cost = self._waiting[attempt_id]
        priority, tenant = request.terms.priority, self.tenant(request)
        lines = self._lines[priority]
        line = lines[tenant]
        self._aside.discard(attempt_id)
        del line.every[attempt_id]
        if line.ready is not line.every:
            line.ready.pop(attempt_id, None)
        if self._shares is not None:
            line.cost -= cost
            if not line.ready:
                self._shares.leave(priority, tenant)
            if line.every:
                self._rank(priority, tenant, line)
            else:
                self._ends[priority].discard(tenant)
        if not line.every:
            del lines[tenant]
        if not lines:
            del self._lines[priority], self._classes[bisect_left(self._classes, priority)]
            self._ends.pop(priority, None)

    def charge(self, priority: int, tenant: str, service: float) -> None:
        """Adds service to the counter of a tenant in a class, or takes it back (`Shares.charge`); there are shares."""
        assert self._shares is not None
        self._shares.charge(priority, tenant, service)
        line = self._lines.get(priority, {}).get(tenant)
        if line is not None:
            self._rank(priority, tenant, line)

    def _rank(self, priority: int, tenant: str, line: _Line) -> None:
        """Notes when the last request of a tenant would be served."""
        assert self._shares is not None
        end = self._shares.counter(priority, tenant) + line.cost / line.weight
        ends = self._ends.get(priority)
        if ends is None:
            ends = self._ends[priority] = Ranking()
        ends.set(tenant, -end)

    def set_aside(self, request: Request) -> None:
        """Lets the others pass this request, which is in the queue."""
        priority, tenant = request.terms.priority, self.tenant(request)
        self._aside.add(request.attempt_id)
        line = self._lines[priority][tenant]
        if line.ready is line.every:
            line.ready = OrderedDict(line.every)
        line.ready.pop(request.attempt_id, None)
        if not line.ready and self._shares is not None:
            self._shares.leave(priority, tenant)

    def call_back(self) -> None:
        """Gives each request that was set aside its place again."""
        if not self._aside:
            return
        for request, _ in [self._waiting[one] for one in sorted(self._aside)]:
            priority, tenant = request.terms.priority, self.tenant(request)
            line = self._lines[priority][tenant]
            line.ready = line.every
            if self._shares is not None:
                self._shares.enter(priority, tenant)
        self._aside = set()

    def head(self) -> Request | None:
        """Returns the request to be served next; None when none waits, or only such as were set aside."""
        for priority in self._classes:
            tenant = "" if self._shares is None else self._shares.first(priority)
            if tenant is not None and (ready := self._lines[priority][tenant].ready):
                return next(iter(ready.values()))
        return None

    def newest(self, priority: int, tenant: str = "") -> Request | None:
        """Returns the request of a tenant in a class that came last; None when none waits, or only such as were set
        aside.
        """
        line = self._lines.get(priority, {}).get(tenant)
        return next(reversed(line.ready.values()), None) if line is not None else None

    def waiting(self) -> list[Request]:
        """Returns all requests that wait, in the order in which they were pushed."""
        return [request for request, _ in self._waiting.values()]

    def least_urgent(self) -> RequestId:
        """Returns the id of the request to be served last. Raises IndexError when the queue is empty."""
        priority = self._classes[-1]
        # where tenants have shares every line is ranked, so the first is not None
        tenant = "" if self._shares is None else self._ends[priority].first() or ""
        return next(reversed(self._lines[priority][tenant].every))

    def oldest_s(self) -> float | None:
        """Returns when the request that has waited longest arrived; None when the queue is empty."""
        return min((request.arrived_s for request, _ in self._waiting.values()), default=None)

    def overdue(self, now_s: float, limit_s: float, from_s: float = -math.inf) -> list[RequestId]:
        """Returns the ids of requests that have waited longer than `limit_s` or whose own deadline has passed, in the
        order in which they were pushed. Waiting before `from_s` does not count.
        """
        return [
            attempt_id
            for attempt_id, (request, _) in self._waiting.items()
            if now_s - max(request.arrived_s, from_s) > limit_s or now_s > request.deadline_s
        ]
