"""The one memory: events in, snapshot out. Driven unchanged by the live router and by the simulator (DESIGN section 1).

Every charge (prefill in progress, KV tokens, decode slots, pool entry) hangs on exactly one `_Live` record and is a
function of that record (`_book`): a change of stage books the old charges off and the new ones on, so a counter cannot
drift, whatever ends the request.

    stage      charged to the prefill worker                     charged to the decode worker
    QUEUED     -                                                 -
    PREFILL    1 prefilling, its tokens, prompt KV tokens        (colocated: slots, on the same worker)
    POOL       prompt KV tokens                                  -
    TRANSFER   prompt KV tokens                                  slots, prompt KV tokens
    DECODE     -                                                 slots, prompt + generated KV tokens
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from policies.state import events as ev
from policies.state.views import Health, PoolEntry, Request, RequestId, Role, Snapshot, Worker, WorkerId


class LiveStage(Enum):
    """Where a live request is; see the module's table for what each stage charges."""

    QUEUED = "queued"
    PREFILL = "prefill"
    POOL = "pool"
    TRANSFER = "transfer"
    DECODE = "decode"


@dataclass(slots=True)
class _Live:
    """A live request and what it charges. Mutable, private to the reducer."""

    request: Request
    stage: LiveStage = LiveStage.QUEUED
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None
    tokens: int = 0
    prefills: int = 0

    @property
    def colocated(self) -> bool:
        """It prefills and decodes on one worker. (Past admission only the decode worker is kept.)"""
        return self.stage is LiveStage.PREFILL and self.decode_worker is not None


@dataclass(slots=True)
class _Load:
    """A worker's facts and charges. Mutable, private to the reducer; `view` is its cached frozen form."""

    up: ev.EngineUp
    health: Health
    prefilling: int = 0
    prefilling_tokens: int = 0
    slots_used: int = 0
    kv_tokens: int = 0
    foreign_kv_tokens: int = 0
    status: ev.EngineStatus | None = None


@dataclass(slots=True)
class ClusterState:
    """`apply(event)` changes it or raises `StaleEvent` and changes nothing; `snapshot(now_s)` shows it."""

    _live: dict[RequestId, _Live] = field(default_factory=dict)
    _loads: dict[WorkerId, _Load] = field(default_factory=dict)
    _views: dict[WorkerId, Worker] = field(default_factory=dict)
    _dirty: set[WorkerId] = field(default_factory=set)
    _pool: dict[RequestId, PoolEntry] = field(default_factory=dict)
    _pool_view: tuple[PoolEntry, ...] | None = None
    _last_chosen: dict[str, WorkerId] = field(default_factory=dict)

    # --------------------------------------------------------------------------------------------------- queries

    def snapshot(self, now_s: float) -> Snapshot:
        """A frozen view; workers that did not change since the last one are shared with it."""
        if self._dirty:
            views = dict(self._views)
            for worker in self._dirty:
                load = self._loads.get(worker)
                if load is None:
                    views.pop(worker, None)
                else:
                    views[worker] = _view(load)
            self._views = views
            self._dirty.clear()
        if self._pool_view is None:
            self._pool_view = tuple(self._pool.values())
        return Snapshot(now_s, self._views, self._pool_view, dict(self._last_chosen))

    def request(self, rid: RequestId) -> Request | None:
        live = self._live.get(rid)
        return live.request if live else None

    def stage(self, rid: RequestId) -> LiveStage | None:
        live = self._live.get(rid)
        return live.stage if live else None

    def prefills(self, rid: RequestId) -> int:
        """How often the request was sent to a prefill worker; 0 for an unknown one."""
        live = self._live.get(rid)
        return live.prefills if live else 0

    def pool_entry(self, rid: RequestId) -> PoolEntry:
        """The pool's entry of `rid`. Raises KeyError when it is not in the pool."""
        return self._pool[rid]

    @property
    def in_flight(self) -> int:
        """Live requests, queued ones included."""
        return len(self._live)

    @property
    def pool_size(self) -> int:
        return len(self._pool)

    @property
    def leases(self) -> int:
        """Requests whose KV is held for a pull: in the pool or in transfer."""
        return sum(live.stage in (LiveStage.POOL, LiveStage.TRANSFER) for live in self._live.values())

    # ---------------------------------------------------------------------------------------------------- events

    def apply(self, event: ev.Event) -> None:
        """Changes the state by one event. Raises StaleEvent (state unchanged) when the event does not fit."""
        handler = _HANDLERS[type(event)]
        handler(self, event)

    def _arrived(self, event: ev.Arrived) -> None:
        request = event.request
        known = self._live.get(request.rid)
        if known is not None:
            self._move(known, LiveStage.QUEUED)
        self._live[request.rid] = _Live(request, prefills=known.prefills if known else 0)

    def _prefill_routed(self, event: ev.PrefillRouted) -> None:
        live, _ = self._need(event.rid, LiveStage.QUEUED, LiveStage.POOL), self._need_worker(event.worker)
        decode_worker = event.worker if event.colocated else None
        self._move(live, LiveStage.PREFILL, prefill_worker=event.worker, decode_worker=decode_worker)
        live.prefills += 1
        self._last_chosen["prefill"] = event.worker

    def _prefill_done(self, event: ev.PrefillDone) -> None:
        live = self._need(event.rid, LiveStage.PREFILL)
        if live.colocated or live.prefill_worker is None:
            raise ev.StaleEvent(f"request {event.rid} is colocated or its worker is gone: no hand-over")
        self._move(live, LiveStage.POOL, prefill_worker=live.prefill_worker)
        self._enter_pool(live, event.now_s, event.lease_until_s, event.kv_bytes, event.cached_tokens)

    def _enter_pool(
        self, live: _Live, now_s: float, lease_until_s: float, kv_bytes: int, cached: int
    ) -> None:
        assert live.prefill_worker is not None
        group = self._loads[live.prefill_worker].up.group
        entry = PoolEntry(live.request, live.prefill_worker, group, now_s, lease_until_s, kv_bytes, cached)
        self._pool[live.request.rid] = entry
        self._pool_view = None

    def _decode_routed(self, event: ev.DecodeRouted) -> None:
        live, _ = self._need(event.rid, LiveStage.POOL), self._need_worker(event.worker)
        self._move(live, LiveStage.TRANSFER, prefill_worker=live.prefill_worker, decode_worker=event.worker)
        self._last_chosen["decode"] = event.worker

    def _admitted(self, event: ev.Admitted | ev.Progressed) -> None:
        rid = event.rid
        live = self._need(rid, LiveStage.PREFILL, LiveStage.TRANSFER, LiveStage.DECODE)
        if live.stage is LiveStage.PREFILL and not live.colocated:
            raise ev.StaleEvent(f"request {rid} still computes its prefill: it cannot be admitted")
        if live.stage is not LiveStage.DECODE:  # else told twice, by its own message and by progress
            self._move(live, LiveStage.DECODE, decode_worker=live.decode_worker)

    def _progressed(self, event: ev.Progressed) -> None:
        self._admitted(event)
        live = self._need(event.rid)
        if event.tokens < live.tokens:
            raise ev.StaleEvent(f"request {event.rid}: {event.tokens} tokens after {live.tokens}")
        self._book(live, -1)
        live.tokens = event.tokens
        self._book(live, +1)

    def _closed(self, event: ev.Closed) -> None:
        self._move(self._need(event.rid), LiveStage.QUEUED)
        del self._live[event.rid]

    def _adopted(self, event: ev.Adopted) -> None:
        rid = event.request.rid
        if rid in self._live:
            raise ev.StaleEvent(f"request {rid} is known already")
        live = _Live(event.request, tokens=event.tokens, prefills=1)
        prefill = event.prefill_worker if event.prefill_worker in self._loads else None
        decode = event.decode_worker if event.decode_worker in self._loads else None
        self._live[rid] = live
        if event.stage == "decode":
            self._move(live, LiveStage.DECODE, decode_worker=decode)
        elif event.stage == "pool" and prefill is not None:
            self._move(live, LiveStage.POOL, prefill_worker=prefill)
            self._enter_pool(live, event.now_s, event.lease_until_s, event.kv_bytes, 0)
        else:
            self._move(live, LiveStage.PREFILL, prefill_worker=prefill, decode_worker=decode)

    # --------------------------------------------------------------------------------------------------- workers

    def _engine_up(self, event: ev.EngineUp) -> None:
        load = self._loads.get(event.worker)
        if load is None:
            self._loads[event.worker] = _Load(event, event.health)
        else:
            load.up, load.health = event, event.health
        self._dirty.add(event.worker)

    def _engine_down(self, event: ev.EngineDown) -> None:
        worker = event.worker
        self._need_worker(worker)
        del self._loads[worker]
        self._dirty.add(worker)
        for live in self._live.values():
            # the charges died with the worker's record: the request must not give them back to a successor of that name
            if live.prefill_worker == worker:
                live.prefill_worker = None
            if live.decode_worker == worker:
                live.decode_worker = None
            if live.prefill_worker is None and self._pool.pop(live.request.rid, None) is not None:
                self._pool_view = None

    def _engine_status(self, event: ev.EngineStatus) -> None:
        load = self._need_worker(event.worker)
        load.status, load.health = event, event.health
        load.foreign_kv_tokens = max(0, event.kv_tokens - load.kv_tokens)
        self._dirty.add(event.worker)

    # --------------------------------------------------------------------------------------------------- charges

    def _need(self, rid: RequestId, *stages: LiveStage) -> _Live:
        live = self._live.get(rid)
        if live is None:
            raise ev.StaleEvent(f"request {rid} is not known (closed, or from before a restart)")
        if stages and live.stage not in stages:
            raise ev.StaleEvent(f"request {rid} is in stage {live.stage.value}: the event does not fit")
        return live

    def _need_worker(self, worker: WorkerId) -> _Load:
        load = self._loads.get(worker)
        if load is None:
            raise ev.StaleEvent(f"worker {worker} is not known")
        return load

    def _move(
        self,
        live: _Live,
        stage: LiveStage,
        prefill_worker: WorkerId | None = None,
        decode_worker: WorkerId | None = None,
    ) -> None:
        """The one way to change a request's stage or workers: old charges off, new ones on."""
        self._book(live, -1)
        if self._pool.pop(live.request.rid, None) is not None:
            self._pool_view = None
        if stage in (LiveStage.QUEUED, LiveStage.PREFILL):
            live.tokens = 0
        live.stage, live.prefill_worker, live.decode_worker = stage, prefill_worker, decode_worker
        self._book(live, +1)

    def _book(self, live: _Live, sign: int) -> None:
        """Adds (+1) or takes back (-1) what `live` charges now, by the table in the module's docstring."""
        stage, request = live.stage, live.request
        prefill = self._loads.get(live.prefill_worker) if live.prefill_worker else None
        decode = self._loads.get(live.decode_worker) if live.decode_worker else None
        if prefill is not None:
            prefill.kv_tokens += sign * request.prompt_tokens
            if stage is LiveStage.PREFILL:
                prefill.prefilling += sign
                prefill.prefilling_tokens += sign * request.prompt_tokens
            self._dirty.add(prefill.up.worker)
        if decode is not None:
            decode.slots_used += sign * request.slots
            if decode is not prefill:  # a colocated prompt is charged once
                decode.kv_tokens += sign * (request.prompt_tokens + live.tokens)
            self._dirty.add(decode.up.worker)


_HANDLERS: dict[type, Callable[[ClusterState, Any], None]] = {
    ev.Arrived: ClusterState._arrived,
    ev.PrefillRouted: ClusterState._prefill_routed,
    ev.PrefillDone: ClusterState._prefill_done,
    ev.DecodeRouted: ClusterState._decode_routed,
    ev.Admitted: ClusterState._admitted,
    ev.Progressed: ClusterState._progressed,
    ev.Closed: ClusterState._closed,
    ev.EngineUp: ClusterState._engine_up,
    ev.EngineDown: ClusterState._engine_down,
    ev.EngineStatus: ClusterState._engine_status,
    ev.Adopted: ClusterState._adopted,
    ev.Tick: lambda state, event: None,
}


def _view(load: _Load) -> Worker:
    up, status = load.up, load.status
    return Worker(
        id=up.worker,
        role=up.role,
        group=up.group,
        node=up.node,
        health=load.health,
        slots=up.slots,
        kv_capacity_tokens=up.kv_capacity_tokens,
        prefilling=load.prefilling,
        prefilling_tokens=load.prefilling_tokens,
        slots_used=load.slots_used,
        kv_tokens=load.kv_tokens,
        foreign_kv_tokens=load.foreign_kv_tokens,
        engine_running=status.running if status else None,
        engine_waiting=status.waiting if status else None,
        status_at_s=status.now_s if status else None,
    )


def role_of(name: str) -> Role:
    """The Role of a name from the wire or a config. Raises ValueError naming the allowed ones."""
    try:
        return Role(name)
    except ValueError:
        raise ValueError(f"role {name!r}: allowed are {', '.join(role.value for role in Role)}") from None
