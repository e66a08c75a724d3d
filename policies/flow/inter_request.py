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
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    _check(batches, bandwidth, drop_budget)
    urgent = {batch.batch: urgency([request.due_at for request in batch.requests]) for batch in batches}
    before: dict[Port, int] = {}
    pool: dict[str, tuple[str, RequestLoad]] = {}
    judged: list[Judged] = []
    pruned: list[str] = []
    for batch in sorted(batches, key=lambda each: (urgent[each.batch].red, each.batch)):
        own: dict[Port, int] = {}
        for request in batch.requests:
            pool[request.request_id] = (batch.batch, request)
            _add(own, request.load, 1)
        while True:
            finish_at, bottleneck = _finish(batch, before, own, bandwidth, now_s)
            if finish_at <= urgent[batch.batch].loose or len(pruned) >= drop_budget or bottleneck is None:
                break
            heaviest = max(
                (request for _, request in pool.values()),
                key=lambda request: (request.load.get(bottleneck, 0), request.request_id),
                default=None,
            )
            if heaviest is None or not heaviest.load.get(bottleneck, 0):
                break
            owner, _ = pool.pop(heaviest.request_id)
            pruned.append(heaviest.request_id)
            _add(own if owner == batch.batch else before, heaviest.load, -1)
        judged.append(Judged(batch.batch, urgent[batch.batch], finish_at))
        _add(before, own, 1)
    return InterRequestOrder(tuple(judged), tuple(pruned))


def load_of(flow: Flow) -> dict[Port, int]:
    """Returns a flow's bytes by port: all of them at the source's egress and at the target's ingress."""
    return {Port(flow.source, Side.EGRESS): flow.size, Port(flow.target, Side.INGRESS): flow.size}


def _finish(
    batch: Batch,
    before: Mapping[Port, int],
    own: Mapping[Port, int],
    bandwidth: Mapping[Port, float],
    now_s: float,
) -> tuple[float, Port | None]:
    """Returns F_i and the bottleneck port u*, None where no port bears load."""
    worst_s, bottleneck = 0.0, None
    for port in {**before, **own}:
        seconds = (before.get(port, 0) + own.get(port, 0)) / bandwidth[port]
        if seconds > worst_s:
            worst_s, bottleneck = seconds, port
    return now_s + batch.compute_s + worst_s, bottleneck


def _add(total: dict[Port, int], load: Mapping[Port, int], sign: int) -> None:
    for port, size in load.items():
        total[port] = total.get(port, 0) + sign * size


def _check(batches: Sequence[Batch], bandwidth: Mapping[Port, float], drop_budget: int) -> None:
    if drop_budget < 0:
        raise BadEvent(f"drop budget is {drop_budget}: it must be at least 0")
    names = [batch.batch for batch in batches]
    ids = [request.request_id for batch in batches for request in batch.requests]
    for what, given in (("batch", names), ("request", ids)):
        if len(set(given)) < len(given):
            twice = sorted(name for name in set(given) if given.count(name) > 1)
            raise BadEvent(f"{what} {twice[0]!r} is given twice: a request belongs to one batch")
    for batch in batches:
        for request in batch.requests:
            for port, size in request.load.items():
                if size < 0 or not is_finite(size):
                    raise BadEvent(
                        f"request {request.request_id!r}: load {size!r} at {port}: it must be >= 0"
                    )
                if not bandwidth.get(port, 0.0) > 0.0:
                    raise BadEvent(f"port {port} bears load and has no bandwidth: give its bytes/s, above 0")
