"""Sharing: the dispatcher's side of a fairness policy (`policies.fairness`).

    queue           the requests before prefill, in the order of the tenants' counters
    prefill_routed  charges the counter of the queue by the forecast of what a request costs
    front, within   the entries of the pool that the decode policy may see: those of tenants within their share
    decode_routed   charges the counter of the pool
    settle          settles both by what was used

Each place has counters of its own, because tenants wait at either and get service there one after the other: what is
computed and then waits in the pool has not been decoded.

All this is done only while `counts`: the policy shares, and requests of several tenants have come, or where classes
have counters (`class_ratio`), requests of several classes. Before that there is nobody to share with, and a newcomer
would be lifted to the counter of the only other one anyway, so all counters begin at 0 with the second tenant or class.
Service of requests that were under way before is not counted.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from policies.dispatch.prefill_queue import PrefillQueue
from policies.fairness.base import OTHERS, FairnessPolicy, Turn
from policies.fairness.shares import MOST_IDLE, Shares
from policies.state import events as ev
from policies.state.reducer import ClusterState, PoolKey
from policies.state.views import PoolEntry, Request, RequestId, WorkerId

OUTPUTS = 5
"""The number of a tenant's last outputs that count for its mean, which moves by this part of each (the published code
of VTC with prediction does the same, `predict_window`).
"""


class Limits:
    """The largest counters with which pool entries may still be sent in one placement: by class those of its `tenants`,
    for classes in which several wait, and that of a class where several wait (None: any).
    """

    __slots__ = ("of_class", "tenants")

    def __init__(self, tenants: dict[int, float], of_class: float | None = None) -> None:
        self.tenants, self.of_class = tenants, of_class

    def __bool__(self) -> bool:
        return bool(self.tenants) or self.of_class is not None


NO_LIMITS = Limits({})


@dataclass(slots=True)
class _Charge:
    """The charge of a request: the tokens of its prompt and of all its outputs, and the class in which it was charged
    in the queue and in the pool (None: it was not charged there).
    """

    tenant: str
    weight: float
    prompt: int
    output: float
    queue: int | None = None
    pool: int | None = None


class Sharing:
    """The queue and the counters of one dispatcher, with its present policy. `turns` counts the decisions for which
    several tenants of a class waited, or several classes with counters.
    """

    def __init__(self, state: ClusterState, policy: FairnessPolicy) -> None:
        self._state = state
        self.policy = policy
        self._queued, self._pooled = Shares(), Shares()
        self.queue = PrefillQueue()
        self._charged: dict[RequestId, _Charge] = {}
        self._outputs: OrderedDict[str, float] = OrderedDict()  # mean output of a choice, by tenant
        self.turns = 0
        self.counts = False
        """Whether the policy shares, and requests of more than one tenant have come since it is in use, or of more
        than one class where classes have counters.
        """
        # the first tenant, and where classes have counters the first class
        self._first: tuple[str, int] | None = None

    @property
    def tenants(self) -> dict[str, int]:
        """The number of tenants that wait in the queue and in the pool, once for each class. Where nothing is counted
        all requests are those of one tenant.
        """
        if not self.counts:
            return {"queue": self.queue.tenants, "pool": int(self._state.pool_size > 0)}
        return {"queue": self._queued.waiting, "pool": self._pooled.waiting}

    def change(self, policy: FairnessPolicy) -> None:
        """Replaces the policy. All counters begin anew, and what waits keeps waiting."""
        self.policy, self._first = policy, None
        self._begin(counts=False)
        for request in self._state.requests():
            self.saw(request)

    def saw(self, request: Request) -> None:
        """Notes whose a request is. The counters begin with the first one of a second tenant or class."""
        if self.counts or not self.policy.shares:
            return
        of = self.policy.tenant(request), 0 if self.policy.class_ratio is None else request.terms.priority
        if self._first is None:
            self._first = of
        elif of != self._first:
            self._begin(counts=True)

    def _begin(self, counts: bool) -> None:
        """Begins or ceases to count, with new counters; what waits keeps waiting."""
        waiting = self.queue.waiting()
        self.counts, self._charged = counts, {}
        credit, ratio = self.policy.credit_tokens, self.policy.class_ratio
        self._queued = Shares(credit, class_ratio=ratio)
        self._pooled = Shares(credit, class_ratio=ratio)
        self.queue.begin(*(self.policy, self._queued) if counts else ())
        for request in waiting:
            self._push(request)
        self._state.tell_tenants_apart(counts, ratio if counts else None)
        self.look_at_pool()

    # --------------------------------------------------------------------------------------------- counting

    def push(self, request: Request) -> None:
        """Puts a request into the queue."""
        if not self.counts:
            self.saw(request)
        self._push(request)

    def _push(self, request: Request) -> None:
        cost = self.policy.cost(request.prompt_tokens, self._output(request)) if self.counts else 0.0
        self.queue.push(request, cost)

    def change_class(self, request: Request) -> None:
        """Puts a request that waits in the queue into another class, as the last of its tenant. `request` is as it is
        served from now on.
        """
        self.queue.remove(request.attempt_id)
        self._push(request)

    def prefill_routed(self, request: Request, worker: WorkerId) -> Turn | None:
        """Charges a request that is sent to a worker to have its prompt computed, before it leaves the queue. A prompt
        that is computed once more is not charged again. Returns whose turn it was.
        """
        if not self.counts or request.attempt_id in self._charged:
            return None
        cached = self._state.hits.tokens(request).get(worker, 0) if request.block_hashes else 0
        charge = self._charge(request, request.prompt_tokens - cached)
        cost = self._cost(charge)
        turn = self._turn(self._queued, request, cost)
        charge.queue = request.terms.priority
        self.queue.charge(charge.queue, charge.tenant, cost, charge.weight)
        return turn

    def prefilled(self, attempt_id: RequestId, cached_tokens: int) -> None:
        """Settles the prompt of a request by the tokens that its engine had cached."""
        charge, request = self._charged.get(attempt_id), self._state.request(attempt_id)
        if charge is not None and request is not None:
            self._settle(charge, max(0, request.prompt_tokens - cached_tokens), charge.output)

    def decode_routed(self, request: Request) -> Turn | None:
        """Charges a request that is sent from the pool to a worker. Returns whose turn it was."""
        if not self.counts:
            return None
        charge = self._charged.get(request.attempt_id) or self._charge(request, request.prompt_tokens)
        cost = self._cost(charge)
        turn = self._turn(self._pooled, request, cost)
        charge.pool = request.terms.priority
        self._charge_pool(charge.pool, charge, cost)
        return turn

    def _charge_pool(self, priority: int, charge: _Charge, cost: float) -> None:
        self._pooled.charge(priority, charge.tenant, cost)
        self._pooled.charge_class(priority, cost * charge.weight)

    def settle(self, event: ev.Event) -> None:
        """Settles the request that the event ends, or has come again, before the state hears of it."""
        if isinstance(event, ev.Closed):
            self.closed(event.attempt_id, event.output_tokens, event.outcome == "finished")
        elif isinstance(event, ev.Arrived):
            self.closed(event.request.attempt_id, 0, finished=False)

    def closed(self, attempt_id: RequestId, output_tokens: int, finished: bool) -> None:
        """Settles a request that ends, or comes again, before the state hears of it. `output_tokens` are those of all
        its choices, as far as the event says; what the state has seen counts at least.
        """
        charge = self._charged.pop(attempt_id, None)
        if charge is None:
            return
        output = max(output_tokens, self._state.generated(attempt_id))
        request = self._state.request(attempt_id)
        if finished and request is not None:
            each, known = output / request.slots, self._outputs.pop(charge.tenant, None)
            self._outputs[charge.tenant] = each if known is None else known + (each - known) / OUTPUTS
            if len(self._outputs) > MOST_IDLE:
                self._outputs.popitem(last=False)
        self._settle(charge, charge.prompt, output)

    def _charge(self, request: Request, prompt: int) -> _Charge:
        tenant, weight = self.policy.tenant(request), request.terms.weight
        charge = _Charge(tenant, weight, max(0, prompt), self._output(request))
        self._charged[request.attempt_id] = charge
        return charge

    def _cost(self, charge: _Charge) -> float:
        return self.policy.cost(charge.prompt, charge.output) / charge.weight

    def _settle(self, charge: _Charge, prompt: int, output: float) -> None:
        """Charges the difference between what a request has used and what it was charged."""
        before = self._cost(charge)
        charge.prompt, charge.output = prompt, output
        more = self._cost(charge) - before
        if charge.queue is not None:
            self.queue.charge(charge.queue, charge.tenant, more, charge.weight)
        if charge.pool is not None:
            self._charge_pool(charge.pool, charge, more)

    def _output(self, request: Request) -> float:
        """Returns the output tokens that are expected of all choices of a request."""
        each = request.predicted_tokens
        if each is None:
            each = self._outputs.get(self.policy.tenant(request), self._state.usual_output_tokens)
        return request.slots * min(each or 0.0, request.max_tokens)

    def _turn(self, shares: Shares, request: Request, cost: float) -> Turn | None:
        """Returns whose turn it is when a request is sent; None unless several tenants wait in its class, or several
        classes that have counters.
        """
        priority, tenant = request.terms.priority, self.policy.tenant(request)
        tenants, classes = shares.tenants(priority), shares.classes
        if tenants < 2 and classes < 2:
            return None
        self.turns += 1
        others = [one for one in shares.in_turn(priority, OTHERS + 1) if one != tenant][:OTHERS]
        return Turn(
            tenant,
            shares.counter(priority, tenant),
            cost,
            tenants,
            {one: shares.counter(priority, one) for one in others},
            _counters_of_classes(shares, priority) if classes > 1 else {},
        )

    def refused(self, attempt_id: RequestId) -> Turn | None:
        """Returns whose turn it is when a request is refused that waits; None where nobody else could have one."""
        request = self._state.request(attempt_id) if self.counts else None
        if request is None:
            return None
        shares = self._queued if self._state.find_waiting(attempt_id) is None else self._pooled
        return self._turn(shares, request, 0.0)

    # ----------------------------------------------------------------------------------------------- the pool

    def look_at_pool(self) -> None:
        """Notes which tenants have begun or ceased to wait in the pool."""
        for line, begins in self._state.take_turned_lines():
            (self._pooled.enter if begins else self._pooled.leave)(*line)

    def front(self, after: PoolKey | None, most: int) -> tuple[list[PoolEntry], bool]:
        """Returns the first `most` entries of the pool behind the key `after`, and whether a later look may begin
        behind them. Where several tenants wait in a class, or several classes have counters, the look begins at the
        front and has the first entries of each, in the order of their counters.
        """
        pooled = self._pooled
        if not pooled.shared:
            entries = self._state.waiting(after, most)
            return entries, len(entries) == most
        entries = []
        priorities = pooled.priorities()
        for n, priority in enumerate(priorities):
            left = most - len(entries)
            if not left:
                break
            if pooled.weighted:
                # no class hides another one that has its turn after it
                left = max(1, left // (len(priorities) - n))
            each = max(1, left // pooled.tenants(priority))
            for tenant in pooled.in_turn(priority, left):
                entries += self._state.first_of((priority, tenant), each)
        return entries[:most], False

    def within(
        self, entries: list[PoolEntry], all_of_them: bool
    ) -> tuple[list[PoolEntry], list[PoolEntry], Limits]:
        """Returns the entries that the decode policy may see, those that it may not, and the largest counters with
        which tenants and classes may send.

        Seen are the entries of the most urgent class whose tenants are within their share. Those of the next class are
        only seen with all of the class before. Where classes have counters, only those of the class are seen whose turn
        it is. With `all_of_them` nothing is kept back.
        """
        if not self._pooled.shared:
            return entries, [], NO_LIMITS
        classes: dict[int, list[PoolEntry]] = {}
        for entry in entries:
            classes.setdefault(entry.request.terms.priority, []).append(entry)
        order, of_class = self._order(classes)
        seen: list[tuple[int, float, PoolEntry]] = []
        kept: list[PoolEntry] = []
        limits: dict[int, float] = {}
        for place, priority in enumerate(order):
            some = classes[priority]
            counters = self._counters(priority, [entry.request for entry in some])
            if len(counters) > 1:
                limits[priority] = min(counters.values()) + self.policy.slack_tokens
            limit = math.inf if all_of_them else limits.get(priority, math.inf)
            behind = bool(kept) or (of_class is not None and place > 0 and not all_of_them)
            for entry in some:
                counter = counters[self.policy.tenant(entry.request)]
                if entry.leaving or (counter <= limit and not behind):
                    seen.append((place, counter, entry))
                else:
                    kept.append(entry)
        seen.sort(key=_in_turn)
        return [entry for *_, entry in seen], kept, Limits(limits, of_class)

    def _order(self, priorities: Iterable[int]) -> tuple[list[int], float | None]:
        """Returns classes in the order in which they have their turns, and the largest counter with which the first one
        may send (None: any).
        """
        order = sorted(priorities)
        if not self._pooled.weighted or len(order) < 2:
            return order, None
        counters = sorted([(self._pooled.class_counter(priority), priority) for priority in order])
        return [priority for _, priority in counters], counters[1][0] + self.policy.slack_tokens

    def limits(self, requests: Sequence[Request]) -> Limits:
        """Returns the limits of `within` for tenants and classes that are about to send."""
        limits: dict[int, float] = {}
        priorities = {request.terms.priority for request in requests}
        for priority in priorities:
            counters = self._counters(priority, [r for r in requests if r.terms.priority == priority])
            if len(counters) > 1:
                limits[priority] = min(counters.values()) + self.policy.slack_tokens
        return Limits(limits, self._order(priorities)[1])

    def may_send(self, entry: PoolEntry, limits: Limits) -> bool:
        """Whether the class and the tenant of an entry are within their shares, after what they have sent already."""
        if not limits or entry.leaving:
            return True
        priority = entry.request.terms.priority
        if limits.of_class is not None and self._pooled.class_counter(priority) > limits.of_class:
            return False
        limit = limits.tenants.get(priority)
        return limit is None or self._pooled.counter(priority, self.policy.tenant(entry.request)) <= limit

    def _counters(self, priority: int, requests: Sequence[Request]) -> dict[str, float]:
        tenants = dict.fromkeys(map(self.policy.tenant, requests))
        return {tenant: self._pooled.counter(priority, tenant) for tenant in tenants}


def _in_turn(seen: tuple[int, float, PoolEntry]) -> tuple[bool, int, float, float, RequestId]:
    place, counter, entry = seen
    return not entry.leaving, place, counter, entry.entered_s, entry.request.attempt_id


def _counters_of_classes(shares: Shares, priority: int) -> dict[str, float]:
    """Returns the counters of a class and of those that have the least."""
    least = [one for one in shares.first_classes(OTHERS + 1) if one != priority][:OTHERS]
    return {str(one): shares.class_counter(one) for one in [priority, *least]}
