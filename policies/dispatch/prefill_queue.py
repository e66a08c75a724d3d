"""The queue of requests that wait for a prefill worker: by class, then by the tenant's counter, then by arrival.

A class is a priority. The fairness policy says whose a request is and which tenant has its turn (`policies.fairness`);
with `none` all requests are one tenant's. A request that is set aside keeps its place, but is not the head: it lets the
others pass until `call_back`.
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
    """The requests of one tenant in one class, oldest first: all of them, and those that are not set aside.
    `cost` is what they count for together, and `weight` the tenant's by its newest request.
    """

    __slots__ = ("cost", "every", "ready", "weight")

    def __init__(self) -> None:
        self.every: OrderedDict[RequestId, Request] = OrderedDict()
        self.ready: OrderedDict[RequestId, Request] = OrderedDict()
        self.cost, self.weight = 0.0, 1.0


class PrefillQueue:
    """The queue. The head, the newest and the least urgent request are found in O(log tenants)."""

    def __init__(self, policy: FairnessPolicy | None = None, shares: Shares | None = None) -> None:
        self._policy = policy or NoFairness()
        self._shares = shares or Shares()
        self._waiting: dict[RequestId, tuple[Request, float]] = {}  # with its cost
        self._aside: set[RequestId] = set()
        self._lines: dict[int, dict[str, _Line]] = {}
        self._classes: list[int] = []  # of lines, ascending
        # in each class the tenants by when their last request would be served, the last one first
        self._ends: dict[int, Ranking] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request, cost: float = 0.0) -> None:
        """Appends a request as the last of its tenant in its class. It replaces a request of the same attempt_id.
        `cost` is what it is expected to count for.
        """
        self._take_out(request.attempt_id)
        self._waiting[request.attempt_id] = request, cost
        priority, tenant = request.terms.priority, self._policy.tenant(request)
        lines = self._lines.get(priority)
        if lines is None:
            lines = self._lines[priority] = {}
            self._ends[priority] = Ranking()
            insort(self._classes, priority)
        line = lines.get(tenant)
        if line is None:
            line = lines[tenant] = _Line()
        if not line.ready:
            self._shares.enter(priority, tenant)
        line.every[request.attempt_id] = line.ready[request.attempt_id] = request
        line.cost += cost
        line.weight = request.terms.weight
        self._rank(priority, tenant)

    def remove(self, attempt_id: RequestId) -> None:
        """Removes a request; an id that is not in the queue is no error."""
        self._take_out(attempt_id)
        self._waiting.pop(attempt_id, None)

    def _take_out(self, attempt_id: RequestId) -> None:
        known = self._waiting.get(attempt_id)
        if known is None:
            return
        request, cost = known
        priority, tenant = request.terms.priority, self._policy.tenant(request)
        line = self._lines[priority][tenant]
        self._aside.discard(attempt_id)
        del line.every[attempt_id]
        line.ready.pop(attempt_id, None)
        line.cost -= cost
        if not line.ready:
            self._shares.leave(priority, tenant)
        if line.every:
            self._rank(priority, tenant)
            return
        del self._lines[priority][tenant]
        self._ends[priority].discard(tenant)
        if not self._lines[priority]:
            del self._lines[priority], self._ends[priority]
            del self._classes[bisect_left(self._classes, priority)]

    def charge(self, priority: int, tenant: str, service: float) -> None:
        """Adds service to the counter of a tenant in a class, or takes it back (`Shares.charge`)."""
        self._shares.charge(priority, tenant, service)
        if tenant in self._lines.get(priority, ()):
            self._rank(priority, tenant)

    def _rank(self, priority: int, tenant: str) -> None:
        """Notes when the last request of a tenant would be served; with one tenant for all nobody asks."""
        if not self._policy.shares:
            return
        line = self._lines[priority][tenant]
        end = self._shares.counter(priority, tenant) + line.cost / line.weight
        self._ends[priority].set(tenant, -end)

    def set_aside(self, request: Request) -> None:
        """Lets the others pass this request, which is in the queue."""
        priority, tenant = request.terms.priority, self._policy.tenant(request)
        self._aside.add(request.attempt_id)
        ready = self._lines[priority][tenant].ready
        ready.pop(request.attempt_id, None)
        if not ready:
            self._shares.leave(priority, tenant)

    def call_back(self) -> None:
        """Gives each request that was set aside its place again."""
        for priority, tenant in dict.fromkeys(
            (self._waiting[one][0].terms.priority, self._policy.tenant(self._waiting[one][0]))
            for one in sorted(self._aside)
        ):
            line = self._lines[priority][tenant]
            line.ready = OrderedDict(line.every)
            self._shares.enter(priority, tenant)
        self._aside = set()

    def head(self) -> Request | None:
        """Returns the request to be served next; None when none waits, or only such as were set aside."""
        for priority in self._classes:
            tenant = self._shares.first(priority)
            if tenant is not None:
                return next(iter(self._lines[priority][tenant].ready.values()))
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
        # where tenants have shares every line is ranked
        tenant = self._ends[priority].first() or next(iter(self._lines[priority]))
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
