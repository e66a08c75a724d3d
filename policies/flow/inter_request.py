"""The order between requests: robust effective deadlines, feasibility and pruning (MFS 4.4.2, Appendix B, Algorithm 1).

    d_1 <= .. <= d_n   deadlines of a batch      k* = argmax over k < n of d_{k+1} - d_k      (the first of equal gaps)
    RED = f * D_T + (1 - f) * D_Lo               f = k* / n, D_T = d_1, D_Lo = d_{k*+1}; n = 1: RED = D_T = D_Lo = d_1
    F_i = now + computation_i + max over ports u of (S(u) + L_i(u)) / B(u)
          S: load of the batches before i, L_i: load of batch i, in bytes

Batches are taken in the order of RED. While F_i > D_Lo of batch i and the drop budget lasts, the request with the most
load on the bottleneck port u*, among all batches taken so far, is pruned and its load subtracted.

The pseudo-code prunes from the pool of all batches taken; the appendix's text (step 3) speaks of the batch alone. This
follows the pseudo-code. Deviations: the bottleneck is the port of largest load / B(u) instead of largest load, which is
the same where all ports are equal; pruning stops where no request in the pool has load on the bottleneck port, because
it could not help (the pseudo-code would spend its whole budget on a batch that only computes for too long). The
estimate adds no other batch's computation, as in the pseudo-code, whose interference S is load only.

Cost: S only grows between two prunings, so the fullest port of the batches before is carried along, and a batch looks
at its own ports alone. With n requests on p ports and k of them pruned it is O(n log n + k p), not O(batches x p).
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from policies.flow.base import BadEvent, Flow, Port, Side, is_finite
from policies.flow.events import Ordered


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """A request of a batch: its deadline on the caller's clock, in seconds, and its bytes by port."""

    request_id: str
    due_at: float
    load: Mapping[Port, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that one prefill step computes together; `compute_s` is the computation left until its KV is made."""

    batch: str
    requests: tuple[RequestLoad, ...]
    compute_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.requests:
            raise BadEvent(f"batch {self.batch!r} has no request: leave it out")
        if not is_finite(self.compute_s) or self.compute_s < 0:
            raise BadEvent(
                f"batch {self.batch!r}: compute_s is {self.compute_s!r}: it must be finite and >= 0"
            )
        for request in self.requests:
            if not is_finite(request.due_at):
                raise BadEvent(
                    f"request {request.request_id!r}: due_at is {request.due_at!r}: it must be finite"
                )


@dataclass(frozen=True, slots=True)
class Urgency:
    """A batch's robust effective deadline and its parts, in seconds on the caller's clock."""

    red: float
    tight: float
    """D_T, the least deadline of the tight requests."""
    loose: float
    """D_Lo, the least deadline of the loose ones."""
    share: float
    """f, the proportion of tight requests."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A batch in the order: its urgency and its estimated finish after pruning."""

    batch: str
    urgency: Urgency
    finish_at: float


@dataclass(frozen=True, slots=True)
class InterRequestOrder:
    """Algorithm 1's result: batches by RED, and pruned requests in the order in which they were pruned."""

    batches: tuple[Judged, ...]
    pruned: tuple[str, ...]

    def event(self) -> Ordered:
        """Returns the order as an arbiter hears it."""
        return Ordered(tuple(each.batch for each in self.batches), self.pruned)


def urgency(deadlines: Sequence[float]) -> Urgency:
    """Returns the robust effective deadline of a batch. Raises BadEvent if there is no deadline."""
    if not deadlines:
        raise BadEvent("a batch without requests has no deadline")
    due = sorted(deadlines)
    if len(due) == 1:
        return Urgency(due[0], due[0], due[0], 1.0)
    split = max(range(1, len(due)), key=lambda k: (due[k] - due[k - 1], -k))
    share = split / len(due)
    return Urgency(share * due[0] + (1 - share) * due[split], due[0], due[split], share)


def schedule(
    batches: Sequence[Batch],
    bandwidth: Mapping[Port, float],
    drop_budget: int,
    now_s: float,
) -> InterRequestOrder:
    """Runs Algorithm 1 over all batches that are admitted now.

    `bandwidth` gives bytes/s for every port that bears load; `drop_budget` is the most requests to prune in all. Ties
    of RED are broken by the batch's name, ties of load by the request's id. Raises BadEvent for a port without
    bandwidth.
    """
    steps = schedule_steps(batches, bandwidth, drop_budget, now_s)
    while True:
        try:
            next(steps)
        except StopIteration as made:
            order: InterRequestOrder = made.value
            return order


def schedule_steps(
    batches: Sequence[Batch],
    bandwidth: Mapping[Port, float],
    drop_budget: int,
    now_s: float,
) -> Generator[None, None, InterRequestOrder]:
    """Runs `schedule` in steps of a batch or a pruned request each, so that the caller can do other work in between."""
    if drop_budget < 0:
        raise BadEvent(f"drop budget is {drop_budget}: it must be at least 0")
    urgent: dict[str, Urgency] = {}
    order: list[tuple[float, str, Batch]] = []
    requests: set[str] = set()
    for batch in batches:
        _check(batch, urgent, requests, bandwidth)
        found = urgent[batch.batch] = urgency([request.due_at for request in batch.requests])
        order.append((found.red, batch.batch, batch))
        yield
    heapify(order)
    before: dict[Port, int] = {}
    fullest: _Fullest = (0.0, None)
    pool = _Pool()
    judged: list[Judged] = []
    pruned: list[str] = []
    while order:
        _, name, batch = heappop(order)
        own: dict[Port, int] = {}
        for request in batch.requests:
            if drop_budget:
                pool.take(name, request)
            _add(own, request.load, 1)
        while True:
            yield
            worst_s, bottleneck = _fuller(fullest, before, own, bandwidth)
            finish_at = now_s + batch.compute_s + worst_s
            if finish_at <= urgent[name].loose or len(pruned) >= drop_budget or bottleneck is None:
                break
            heaviest = pool.drop_heaviest(bottleneck)
            if heaviest is None:
                break
            owner, request = heaviest
            pruned.append(request.request_id)
            if owner == name:
                _add(own, request.load, -1)
            else:
                _add(before, request.load, -1)
                fullest = _fuller((0.0, None), {}, before, bandwidth)
        judged.append(Judged(name, urgent[name], finish_at))
        fullest = (worst_s, bottleneck)
        _add(before, own, 1)
    return InterRequestOrder(tuple(judged), tuple(pruned))


def load_of(flow: Flow) -> dict[Port, int]:
    """Returns a flow's bytes by port: all of them at the source's egress and at the target's ingress."""
    return {Port(flow.source, Side.EGRESS): flow.size, Port(flow.target, Side.INGRESS): flow.size}


_Fullest = tuple[float, Port | None]
"""The seconds that the fullest port needs for its load, and the port; (0, None) where no port bears load."""


def _fuller(
    fullest: _Fullest, before: Mapping[Port, int], own: Mapping[Port, int], bandwidth: Mapping[Port, float]
) -> _Fullest:
    """Returns the bottleneck u* with a batch's `own` load: the fullest port `before` it, or one of its own."""
    worst_s, bottleneck = fullest
    for port, size in own.items():
        seconds = (before.get(port, 0) + size) / bandwidth[port]
        if seconds > worst_s:
            worst_s, bottleneck = seconds, port
    return worst_s, bottleneck


class _Last(str):
    """A request's id that sorts the other way round: of equal loads the last id is pruned."""

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return str.__gt__(self, other)


class _Pool:
    """The requests taken so far. The loads of a port become a heap when it is first asked for its heaviest."""

    def __init__(self) -> None:
        self._taken: dict[str, tuple[str, RequestLoad]] = {}
        self._loads: dict[Port, list[tuple[int, str]]] = {}
        self._heaps: dict[Port, list[tuple[int, _Last]]] = {}

    def take(self, batch: str, request: RequestLoad) -> None:
        """Takes a request of a batch in."""
        self._taken[request.request_id] = (batch, request)
        for port, size in request.load.items():
            if not size:
                continue
            heap = self._heaps.get(port)
            if heap is not None:
                heappush(heap, (-size, _Last(request.request_id)))
                continue
            loads = self._loads.get(port)
            if loads is None:
                loads = self._loads[port] = []
            loads.append((-size, request.request_id))

    def drop_heaviest(self, port: Port) -> tuple[str, RequestLoad] | None:
        """Takes out the request with the most load on the port; returns it with its batch, None if there is none."""
        heap = self._heaps.get(port)
        if heap is None:
            loads = self._loads.pop(port, [])
            heap = self._heaps[port] = [(load, _Last(name)) for load, name in loads if name in self._taken]
            heapify(heap)
        while heap:
            _, request_id = heappop(heap)
            if request_id in self._taken:
                return self._taken.pop(request_id)
        return None


def _add(total: dict[Port, int], load: Mapping[Port, int], sign: int) -> None:
    for port, size in load.items():
        total[port] = total.get(port, 0) + sign * size


def _check(
    batch: Batch, batches: Mapping[str, object], requests: set[str], bandwidth: Mapping[Port, float]
) -> None:
    """Raises BadEvent for a batch that was given before, or has a load that cannot be. Adds its ids to `requests`."""
    if batch.batch in batches:
        raise BadEvent(f"batch {batch.batch!r} is given twice: a request belongs to one batch")
    for request in batch.requests:
        if request.request_id in requests:
            raise BadEvent(f"request {request.request_id!r} is given twice: a request belongs to one batch")
        requests.add(request.request_id)
        for port, size in request.load.items():
            # almost all loads are whole numbers, which are finite
            if size < 0 or (type(size) is not int and not is_finite(size)):
                raise BadEvent(f"request {request.request_id!r}: load {size!r} at {port}: it must be >= 0")
            if not bandwidth.get(port, 0.0) > 0.0:
                raise BadEvent(f"port {port} bears load and has no bandwidth: give its bytes/s, above 0")
