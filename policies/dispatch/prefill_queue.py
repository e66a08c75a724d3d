"""The queue of requests that wait for a prefill worker: by class, then by the tenant's counter, then by arrival.

A class is a priority. The fairness policy says whose a request is and which tenant has its turn (`policies.fairness`);
with `none`, and before requests of several tenants have come, all are one tenant's. Where classes have counters
(`VirtualTokenCounter.class_ratio`) the class with the least one goes first, else the most urgent one. A request that is
set aside keeps its place, but is not the head: it lets the others pass until `call_back`.
"""

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from policies.fairness.base import FairnessPolicy
from policies.fairness.none import NoFairness
from policies.fairness.ranking import Ranking
from policies.fairness.shares import Shares
from policies.state.views import Request, RequestId


def _never(request: Request) -> bool:
    """Returns False: any request may have to go from a full queue."""
    return False


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


class _Held(NamedTuple):
    """The sum of what waits of one tenant, over all classes; its `weight` is that of its newest request."""

    sequences: int = 0
    prompt_tokens: int = 0
    weight: float = 1.0

    def has_as_much_as(self, other: "_Held", sequences: bool, tokens: bool) -> bool:
        """Returns whether this tenant has as much for its weight as another one, of `sequences`, `tokens` or both."""
        return (not sequences or self.sequences * other.weight >= other.sequences * self.weight) and (
            not tokens or self.prompt_tokens * other.weight >= other.prompt_tokens * self.weight
        )

    def without(self, request: Request) -> "_Held":
        """Returns what is left when one of its requests has gone."""
        return _Held(self.sequences - request.slots, self.prompt_tokens - request.prompt_tokens, self.weight)


class PrefillQueue:
    """The queue. The head, the newest and the last request are found in O(log tenants).

    Without `shares` all requests are those of one tenant, whose name is "".
    """

    def __init__(self, policy: FairnessPolicy | None = None, shares: Shares | None = None) -> None:
        self.begin(policy, shares)

    def begin(self, policy: FairnessPolicy | None = None, shares: Shares | None = None) -> None:
        """Begins anew with an empty queue."""
        self._policy = policy or NoFairness()
        self._shares = shares
        self._waiting: dict[RequestId, tuple[Request, float]] = {}  # with its cost
        self._held: dict[str, _Held] = {}
        self.sequences = 0
        """The sequences of all requests that wait: one for each of their choices."""
        self.prompt_tokens = 0
        """The prompt tokens of all requests that wait."""
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
        self.sequences += request.slots
        self.prompt_tokens += request.prompt_tokens
        priority, tenant = request.terms.priority, self.tenant(request)
        held = self._held.get(tenant, _Held())
        self._held[tenant] = _Held(
            held.sequences + request.slots, held.prompt_tokens + request.prompt_tokens, request.terms.weight
        )
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
        self.sequences -= request.slots
        self.prompt_tokens -= request.prompt_tokens
        priority, tenant = request.terms.priority, self.tenant(request)
        held = self._held[tenant] = self._held[tenant].without(request)
        if not held.sequences:
            del self._held[tenant]
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

    def charge(self, priority: int, tenant: str, service: float, weight: float) -> None:
        """Adds service to the counters of a tenant of this weight in a class, for each unit of it, and of the class, or
        takes it back (`Shares.charge`); there are shares.
        """
        assert self._shares is not None
        self._shares.charge(priority, tenant, service)
        self._shares.charge_class(priority, service * weight)
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
        shares = self._shares
        if shares is not None and shares.weighted:
            first = shares.first_class()
            return None if first is None else self._head_of(first)
        for priority in self._classes:
            head = self._head_of(priority)
            if head is not None:
                return head
        return None

    def _head_of(self, priority: int) -> Request | None:
        """Returns the request of a class to be served next; None when only such wait as were set aside."""
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

    def find(self, attempt_id: RequestId) -> Request | None:
        """Returns a request by its id; None when it does not wait."""
        found = self._waiting.get(attempt_id)
        return None if found is None else found[0]

    @property
    def priorities(self) -> list[int]:
        """The classes in which requests wait, the most urgent one first."""
        return list(self._classes)

    def beyond(
        self, sequences: int, prompt_tokens: float, came: Request, stays: Callable[[Request], bool] = _never
    ) -> list[RequestId]:
        """Returns the ids of the requests that have to go for the request `came`, which is in the queue already, so
        that no more than these sequences and prompt tokens wait: what would be served last, the last one first.

        They are served after `came`; if these are not enough, `came` is the only one that has to go. Another tenant's
        request has to go only while that tenant has as much in the queue, over all classes and for its weight, as the
        tenant of `came`: classes say who is served first, and do not let one tenant drive all others out. Where more
        waited before, because the bound has become smaller, no more than its own size has to go. One that waits alone
        may be of any size.

        A request of which `stays` returns True is passed over and never has to go. If `came` is one, requests that are
        served before it go as well, the last ones first, and where these are not enough more wait than the bound says.
        """
        if len(self) < 2:
            return []
        if came.slots > sequences or came.prompt_tokens > prompt_tokens:
            return [] if stays(came) else [came.attempt_id]
        more = min(self.sequences - sequences, came.slots)
        tokens = min(self.prompt_tokens - prompt_tokens, came.prompt_tokens)
        own, held = self.tenant(came), dict(self._held)
        gone: list[RequestId] = []

        def must_give(tenant: str) -> bool:
            return tenant == own or held[tenant].has_as_much_as(held[own], more > 0, tokens > 0)

        # by tenant: its requests that were passed over, each with its place from the end
        spared: dict[str, deque[tuple[int, Request]]] = {}
        others = any(must_give(tenant) for tenant in held if tenant != own)
        for place, last in enumerate(self._from_the_end(None if others else own)):
            if more <= 0 and tokens <= 0:
                break
            if stays(last):
                continue
            if last is came:
                return [came.attempt_id]
            spared.setdefault(self.tenant(last), deque()).append((place, last))
            # when one of its own goes, the tenant of `came` has less, and others may have to give after all
            giving = [self.tenant(last)] if must_give(self.tenant(last)) else []
            while giving and (more > 0 or tokens > 0):
                tenant = min(giving, key=lambda name: spared[name][0][0])
                _, request = spared[tenant].popleft()
                if not spared[tenant]:
                    del spared[tenant]
                gone.append(request.attempt_id)
                held[tenant] = held[tenant].without(request)
                more -= request.slots
                tokens -= request.prompt_tokens
                giving = [name for name in spared if must_give(name)]
        return gone

    def _from_the_end(self, only: str | None = None) -> Iterator[Request]:
        """Yields the requests that wait, from the one to be served last on, while nothing changes. With `only` those of
        all other tenants may be left out.
        """
        shares = self._shares
        if only is not None and (shares is None or not shares.weighted):
            for priority in reversed(self._classes):
                line = self._lines[priority].get(only)
                if line is not None:
                    yield from reversed(line.every.values())
            return
        if shares is None or not shares.weighted:
            for priority in reversed(self._classes):
                yield from self._class_from_the_end(priority)
            return
        # the last is in the class whose counter will be the largest; of equal ones the least urgent has the last
        costs = {p: sum([line.cost for line in self._lines[p].values()]) for p in self._classes}
        ends = [(-shares.class_end(p, costs[p]), -p) for p in self._classes]
        heapify(ends)
        lines = {p: self._class_from_the_end(p) for p in self._classes}
        while ends:
            priority = -ends[0][1]
            request = next(lines[priority], None)
            if request is None:
                heappop(ends)
                continue
            yield request
            costs[priority] -= self._waiting[request.attempt_id][1]
            heapreplace(ends, (-shares.class_end(priority, costs[priority]), -priority))

    def _class_from_the_end(self, priority: int) -> Iterator[Request]:
        """Yields the requests of a class, from the one to be served last on, while nothing changes."""
        lines = self._lines[priority]
        if self._shares is None:
            yield from reversed(lines[""].every.values())
            return
        # every line is ranked, by minus the counter that its tenant will have when all of it has been served
        first = next(reversed(lines[self._ends[priority].first() or ""].every.values()))
        yield first
        ends = self._ends[priority].ordered()
        left = {name: reversed(line.every.values()) for name, line in lines.items()}
        while ends:
            key, at, name = ends[0]
            request = next(left[name], None)
            if request is None:
                heappop(ends)
                continue
            if request is not first:
                yield request
            cost = self._waiting[request.attempt_id][1]
            heapreplace(ends, (key + cost / lines[name].weight, at, name))

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
