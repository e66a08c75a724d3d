"""The reducer's mutable records: a live request with its charges, and a worker's charges with their frozen view.

Only `ledger` and the handlers of events use them; the table of `ledger` lists the charges of each stage.
"""

import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from policies.request.stage import Stage
from policies.state import events as ev
from policies.state.fast_frozen import fast_constructor
from policies.state.views import (
    Departure,
    Health,
    Indicators,
    Request,
    RequestId,
    Transfers,
    Worker,
    WorkerId,
)


@dataclass(slots=True)
class LiveRequest:
    """A live request and the facts that its charges follow from."""

    request: Request
    stage: Stage = Stage.QUEUED
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None
    tokens: int = 0
    prefills: int = 0
    finishes_at_tokens: float | None = None
    """Forecast tokens of one sequence at its end; None: the request stays."""

    @property
    def colocated(self) -> bool:
        """Whether the request prefills and decodes on one worker. Past admission only the decode worker is kept."""
        return self.stage is Stage.PREFILLING and self.decode_worker is not None


# Departure(*row) without a Python call for each row
_departure: Callable[[tuple[int, int, int]], Departure] = functools.partial(tuple.__new__, Departure)

Growth = tuple[LiveRequest, int, int]
"""A request and its generated tokens before and after."""


@dataclass(slots=True)
class Departures:
    """Forecast departures of one worker's sequences, by the number of decode steps until each finishes.

    The number is at least 1: a running sequence never counts as gone already. Each generated token brings its request
    one step closer, so its step changes. Where many requests grow at once the steps are dropped and counted anew at the
    next `view`, which costs a quarter of moving each.
    """

    lives: dict[RequestId, LiveRequest] = field(default_factory=dict)
    steps: dict[int, tuple[int, int]] | None = field(default_factory=dict)
    """Sequences and their KV tokens by step; None: dropped."""
    shown: tuple[Departure, ...] | None = ()
    """The last `view`; None: the steps have changed since."""

    def book(self, live: LiveRequest, sign: int) -> None:
        """Adds (+1) or takes off (-1) a request with a forecast, at its present tokens."""
        if sign > 0:
            self.lives[live.request.attempt_id] = live
        else:
            del self.lives[live.request.attempt_id]
        self.shown = None
        if self.steps is not None:
            _count(self.steps, live, live.tokens, sign)

    def grew(self, growths: list[Growth]) -> None:
        """Moves requests with a forecast, which have generated more tokens, to their new steps."""
        self.shown = None
        if self.steps is None:
            return
        if 4 * len(growths) >= len(self.lives):
            self.steps = None
            return
        for live, before, after in growths:
            _count(self.steps, live, before, -1)
            _count(self.steps, live, after, +1)

    def view(self) -> tuple[Departure, ...]:
        """The departures by step, ascending."""
        if self.steps is None:
            self.steps = self._count_all()
        if self.shown is None:
            rows = sorted([(step, *gone) for step, gone in self.steps.items()])
            self.shown = tuple(map(_departure, rows))
        return self.shown

    def _count_all(self) -> dict[int, tuple[int, int]]:
        """Counts every request anew: `_count` in a loop, written out because it runs for most tokens."""
        steps: dict[int, tuple[int, int]] = {}
        ceil = math.ceil
        for live in self.lives.values():
            request, tokens, at_tokens = live.request, live.tokens, live.finishes_at_tokens
            assert at_tokens is not None
            slots, held = request.slots, request.prompt_tokens + tokens
            step = ceil(at_tokens - (tokens if slots == 1 else tokens / slots))
            if step < 1:
                step = 1
            if step in steps:
                sequences, kv_tokens = steps[step]
                steps[step] = sequences + slots, kv_tokens + held
            else:
                steps[step] = slots, held
        return steps


def _count(steps: dict[int, tuple[int, int]], live: LiveRequest, tokens: int, sign: int) -> None:
    """Counts the request in (+1) or out (-1) at the step that follows from its `tokens`."""
    request, at_tokens = live.request, live.finishes_at_tokens
    assert at_tokens is not None
    slots = request.slots
    step = math.ceil(at_tokens - tokens / slots)
    if step < 1:
        step = 1
    sequences, kv_tokens = steps.get(step, (0, 0))
    sequences += sign * slots
    if sequences:
        steps[step] = sequences, kv_tokens + sign * (request.prompt_tokens + tokens)
    else:
        del steps[step]


@dataclass(slots=True)
class Load:
    """A worker's facts and charges."""

    up: ev.EngineUp
    health: Health
    prefilling: int = 0
    prefilling_tokens: int = 0
    slots_used: int = 0
    kv_tokens: int = 0
    foreign_kv_tokens: int = 0
    status: ev.EngineStatus | None = None
    sending: int = 0
    transfers: dict[tuple[WorkerId, int], int] = field(default_factory=dict)
    """Transfers in flight, by receiver and priority."""
    departures: Departures = field(default_factory=Departures)
    reports: deque[tuple[ev.EngineStatus, int]] = field(default_factory=deque)
    """Reports within the window, each with `sending` at its time."""
    indicators: Indicators | None = None
    unreported: int = 0
    transfers_view: tuple[Transfers, ...] | None = ()
    """`transfers` as shown in views; None: they have changed since."""


_fast_worker = fast_constructor(Worker)


def view_of(load: Load) -> Worker:
    """A worker's frozen view; the values come in the order of Worker's fields."""
    if load.transfers_view is None:
        load.transfers_view = tuple([Transfers(*key, n) for key, n in sorted(load.transfers.items())])
    up, status = load.up, load.status
    return _fast_worker(
        up.worker,
        up.role,
        up.group,
        up.node,
        load.health,
        up.slots,
        up.kv_capacity_tokens,
        load.prefilling,
        load.prefilling_tokens,
        load.slots_used,
        load.kv_tokens,
        load.foreign_kv_tokens,
        status.running if status is not None else None,
        status.waiting if status is not None else None,
        status.now_s if status is not None else None,
        up.barrier,
        load.sending,
        load.transfers_view,
        load.departures.view(),
        load.indicators,
        load.unreported,
    )
