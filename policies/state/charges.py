"""The reducer's mutable records: a live request with its charges, and a worker's charges with their view.

Only `ledger` and the handlers of events use them. A table in the docstring of `ledger` lists the charges of each stage.
"""

import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.request.stage import Stage
from policies.state import events as ev
from policies.state.held_blocks import HeldBlocks
from policies.state.standing import Standing
from policies.state.views import (
    Departure,
    Health,
    Indicators,
    Request,
    RequestId,
    Role,
    Transfers,
    Worker,
    WorkerId,
)


class Held(NamedTuple):
    """The KV of a finished prefill, held under a lease since `entered_s`, which was last renewed at `renewed_s` and
    granted for `lease_s` seconds at first.
    """

    entered_s: float
    lease_until_s: float
    kv_bytes: int
    cached_tokens: int
    renewed_s: float | None = None
    lease_s: float | None = None


@dataclass(slots=True)
class LiveRequest:
    """A request that has not been closed, and the facts from which its charges follow.

    It may name workers that are not known, because they are away or have not announced themselves to a new router. It
    charges them nothing until they come. `held` is None before the prefill is done.
    """

    request: Request
    stage: Stage = Stage.QUEUED
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None
    tokens: int = 0
    prefills: int = 0
    fetches: bool = False
    """Whether the prompt's prefix is fetched before the rest is computed; set while PREFILLING."""
    held: Held | None = None
    decode_routed_s: float | None = None
    """Time of the decision for the decode worker; None before it, after an adoption, and if the worker had no room."""
    first_from_s: float | None = None
    """Time from which the first token counts for the speed of its worker: the choice of a colocated worker, else the
    admission; None before it, and after an adoption.
    """
    finishes_at_tokens: float | None = None
    """Forecast length of each sequence at its end, in generated tokens; None: the request is expected to stay."""
    hit_blocks: dict[WorkerId, int] = field(default_factory=dict)
    """Blocks at the prompt's head that the request shares with others, by worker (`held_blocks`)."""
    asked_priority: int | None = None
    """The priority with which the request came, if ageing has changed it since; `request` has the present one."""

    @property
    def colocated(self) -> bool:
        """Whether one worker is to prefill and decode the request. After admission it is always False, because only the
        decode worker is kept then.
        """
        return self.stage is Stage.PREFILLING and self.decode_worker is not None


# Departure(*row) without a Python call for each row
_departure: Callable[[tuple[int, int, int]], Departure] = functools.partial(tuple.__new__, Departure)

Growth = tuple[LiveRequest, int, int]
"""A request and its generated tokens before and after."""


@dataclass(slots=True)
class Departures:
    """Forecast departures of one worker's sequences, by the number of decode steps until each finishes.

    The number of steps is at least 1: a running sequence never counts as gone already. Each generated token brings its
    request one step closer, so its step changes. When a quarter of the requests or more grow at once, the steps are
    dropped and counted again at the next `view`; to count a request again costs a quarter of moving it.
    """

    lives: dict[RequestId, LiveRequest] = field(default_factory=dict)
    steps: dict[int, tuple[int, int]] | None = field(default_factory=dict)
    """(sequences, their KV tokens) by step; None after the steps were dropped."""
    shown: tuple[Departure, ...] | None = ()
    """The last result of `view`; None when the steps have changed since."""

    def book(self, live: LiveRequest, sign: int) -> None:
        """Adds (`sign` +1) or removes (-1) a request that has a forecast, at its present tokens."""
        if sign > 0:
            self.lives[live.request.attempt_id] = live
        else:
            del self.lives[live.request.attempt_id]
        self.shown = None
        if self.steps is not None:
            _count(self.steps, live, live.tokens, sign)

    def grew(self, growths: list[Growth]) -> None:
        """Moves requests that have generated more tokens to their new steps. All of them must have a forecast."""
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
        """Returns the departures, one for each step that has any, in ascending order of steps."""
        if self.steps is None:
            self.steps = self._count_all()
        if self.shown is None:
            rows = sorted([(step, *gone) for step, gone in self.steps.items()])
            self.shown = tuple(map(_departure, rows))
        return self.shown

    def _count_all(self) -> dict[int, tuple[int, int]]:
        """Counts every request again and returns the new `steps`.

        The body of `_count` is written out here, because this loop runs for most tokens.
        """
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


USUAL_OF = 64  # ASSUMPTION
"""Number of departures over which `SlotDepartures` averages."""


@dataclass(slots=True)
class SlotDepartures:
    """The output tokens that all workers generate for each sequence that ends, as means that fade with each departure.

    In the long run this is the mean output of a sequence. It counts the tokens of the sequences that still run, because
    the mean over those that have ended would be too short: the shortest end first.
    """

    sequences: float = 0.0
    tokens: float = 0.0
    seen: int = 0
    """Tokens generated until the last departure."""

    def departed(self, slots: int, generated: int) -> None:
        """Notes that `slots` sequences have left a decode worker. `generated` are the tokens generated so far."""
        kept = 1.0 - 1.0 / USUAL_OF
        self.sequences = kept * self.sequences + slots
        # fewer than before when a worker has gone
        self.tokens = kept * self.tokens + max(0, generated - self.seen)
        self.seen = generated

    @property
    def tokens_each(self) -> float | None:
        """Output tokens for each sequence that ended; None before the first."""
        return self.tokens / self.sequences if self.sequences else None


def _count(steps: dict[int, tuple[int, int]], live: LiveRequest, tokens: int, sign: int) -> None:
    """Adds (`sign` +1) or removes (-1) the request at the step that follows from `tokens`, its generated tokens."""
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


class Report(NamedTuple):
    """An engine's report, with what the router charged to the worker then: the length of its `sending` queue, and the
    share of its prompts in all its requests that compute or wait (0..1).
    """

    status: ev.EngineStatus
    sending: int
    prefill_share: float


@dataclass(slots=True)
class Load:
    """A worker's facts, the charges of its requests, and the engine's reports."""

    up: ev.EngineUp
    health: Health
    standing: Standing
    prefilling: int = 0
    fetching: int = 0
    """The number of prompts in `prefilling` whose prefix is fetched first."""
    prefilling_tokens: int = 0
    slots_used: int = 0
    decoding: int = 0
    """The number of sequences in `slots_used` whose prompt is not computed here, or is computed already."""
    kv_tokens: int = 0
    booked_kv_tokens: int = 0
    """Sum of all that bookings have added to `kv_tokens` and taken back; progress adds the rest."""
    foreign_kv_tokens: int = 0
    blocks: HeldBlocks = field(default_factory=HeldBlocks)
    """The prompt blocks of the requests charged to the worker, with the copies of each."""
    status: ev.EngineStatus | None = None
    sending: int = 0
    transfers: dict[tuple[WorkerId, int], int] = field(default_factory=dict)
    """Number of transfers in flight, by receiver and priority."""
    departures: Departures = field(default_factory=Departures)
    reports: deque[Report] = field(default_factory=deque)
    """The engine's reports of the last `worker_events.INDICATOR_WINDOW_S`."""
    indicators: Indicators | None = None
    unreported: int = 0
    unreported_prefills: int = 0
    transfers_view: tuple[Transfers, ...] | None = ()
    """`transfers` as the last view shows them; None when they have changed since."""

    @property
    def computing(self) -> int:
        """Number of prompts by which the worker's speed is judged. One that fetches its prefix waits for its lender and
        the network, which says nothing about the worker; what its engine computed of it counts at its end.
        """
        return self.prefilling - self.fetching

    @property
    def prefill_share(self) -> float:
        """Share of the prompts in all requests that compute or wait on the worker, 0..1. Without any, a report can
        only show work that the router does not know; it belongs to the worker's role then.
        """
        known = self.prefilling + self.decoding
        if known:
            return self.prefilling / known
        return 0.0 if self.up.role is Role.DECODE else 1.0

    @property
    def has_room(self) -> bool:
        """Whether slots and KV suffice for all that is charged to the worker and found on it."""
        if self.slots_used > self.up.slots:
            return False
        return self.own_kv_tokens_in_use + self.foreign_kv_tokens <= self.up.kv_capacity_tokens

    @property
    def own_kv_tokens_in_use(self) -> int:
        """KV tokens that the worker's requests keep in memory: a block that several requests share counts once."""
        return self.kv_tokens - self.blocks.shared_tokens

    @property
    def generated_tokens(self) -> int:
        """Number of output tokens that the worker has generated since it came, those of ended requests included."""
        return self.kv_tokens - self.booked_kv_tokens


def view_of(load: Load) -> Worker:
    """Returns a worker's view. The values are passed in the order of Worker's fields."""
    if load.transfers_view is None:
        load.transfers_view = tuple([Transfers(*key, n) for key, n in sorted(load.transfers.items())])
    up, status = load.up, load.status
    return Worker(
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
        load.standing.quarantine,
        load.blocks.shared_tokens,
        load.unreported_prefills,
    )
