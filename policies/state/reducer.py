"""The one memory: events in, snapshot out. For the live router and the simulator alike (DESIGN section 1).

Every charge (prefill in progress, KV tokens, decode slots, pool entry) hangs on exactly one `Live` record and is a
function of that record (`_book`): a change of stage books the old charges off and the new ones on, so a counter cannot
drift, whatever ends the request.

    stage      charged to the prefill worker                     charged to the decode worker
    QUEUED     -                                                 -
    PREFILL    1 prefilling, its tokens, prompt KV tokens        (colocated: slots, on the same worker)
    POOL       prompt KV tokens                                  -
    TRANSFER   prompt KV tokens                                  slots, prompt KV tokens
    DECODE     -                                                 slots, prompt + generated KV tokens

A prefill worker is also charged `sending` from POOL to TRANSFER and the transfer itself during TRANSFER; a decode
worker the departure of every request that has a forecast. Engine reports are kept for a sliding window (FlowKV B.2).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.routing.oracle import Oracle
from policies.state import events as ev
from policies.state.charges import Growth, Live, LiveStage, Load, view_of
from policies.state.indicators import mean_indicators
from policies.state.pool import Pool, PoolKey, pool_key
from policies.state.prefix_hits import IndexHits
from policies.state.prefix_index import PrefixIndex
from policies.state.views import (
    NO_HITS,
    PoolEntry,
    Request,
    RequestId,
    Role,
    Snapshot,
    Worker,
    WorkerId,
)

INDICATOR_WINDOW_S = 2.0  # ASSUMPTION: FlowKV names a sliding window, not its length; 20 reports of 0.1 s


@dataclass(slots=True)
class ClusterState:
    """`apply(event)` changes it or raises `StaleEvent` and changes nothing; `snapshot(now_s)` shows it.

    For who decides only when it may matter: `take_eased` and `take_entered` tell what was freed and what came since
    they were last called; `fleet_version` grows when a worker comes, goes, or changes its facts or health.
    """

    _live: dict[RequestId, Live] = field(default_factory=dict)
    _loads: dict[WorkerId, Load] = field(default_factory=dict)
    _views: dict[WorkerId, Worker] = field(default_factory=dict)
    _dirty: set[WorkerId] = field(default_factory=set)
    _pool: Pool = field(default_factory=Pool)
    _eased: set[WorkerId] = field(default_factory=set)
    _last_chosen: dict[str, WorkerId] = field(default_factory=dict)
    _oracle: Oracle | None = None
    _prefix: dict[str, PrefixIndex] = field(default_factory=dict)  # by engine group
    _hit_memo: dict[RequestId, tuple[int, dict[WorkerId, int]]] = field(default_factory=dict)
    refused_items: int = 0  # of ProgressedMany, since the start
    fleet_version: int = 0

    # --------------------------------------------------------------------------------------------------- queries

    def snapshot(self, now_s: float, pool: Sequence[PoolEntry] | None = None) -> Snapshot:
        """A frozen view; workers that did not change since the last one are shared with it. `pool` limits it to these
        entries (None: all), so that its cost does not grow with a backlog.
        """
        if self._dirty:
            views, joined = dict(self._views), not self._dirty <= self._views.keys()
            for worker in self._dirty:
                load = self._loads.get(worker)
                if load is None:
                    views.pop(worker, None)
                else:
                    views[worker] = view_of(load)
            # by id, whenever snapshots are taken: else sums over workers would differ in their last digit in a replay
            self._views = dict(sorted(views.items())) if joined else views
            self._dirty.clear()
        shown = tuple(self.waiting()) if pool is None else tuple(pool)
        hits = IndexHits(self._prefix, self._hit_memo) if self._prefix else NO_HITS
        return Snapshot(now_s, self._views, shown, dict(self._last_chosen), self._oracle, hits)

    def worker(self, worker: WorkerId) -> Worker | None:
        """One worker as it is now; None: it is gone."""
        load = self._loads.get(worker)
        if load is None:
            return None
        return view_of(load) if worker in self._dirty else self._views[worker]

    def waiting(self, after: PoolKey | None = None, most: int | None = None) -> list[PoolEntry]:
        """Pool entries in the order in which they should be served: the first `most` behind `after`."""
        return self._pool.waiting(after, most)

    def oldest_of_each_priority(self) -> list[PoolKey]:
        """The key of the entry that has waited longest, for each priority in the pool, most urgent first."""
        return self._pool.oldest_of_each_priority()

    def take_eased(self) -> set[WorkerId]:
        """The workers where slots or KV were given back since the last call."""
        eased, self._eased = self._eased, set()
        return eased

    def take_entered(self) -> list[PoolEntry]:
        """The entries that came into the pool since the last call and are in it now, oldest first."""
        return self._pool.take_entered()

    def prefix_index(self, group: str) -> PrefixIndex | None:
        """The group's prefix index (sizes, and the feeds that want a replay); None before its first KV event."""
        return self._prefix.get(group)

    def prefix_index_of(self, worker: WorkerId) -> PrefixIndex | None:
        """The index of a worker's group; None before the group's first KV event, and for an unknown worker."""
        load = self._loads.get(worker)
        return None if load is None else self._prefix.get(load.up.group)

    @property
    def prefix_indexes(self) -> tuple[PrefixIndex, ...]:
        """The indexes of all groups."""
        return tuple(self._prefix.values())

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
        return self._pool.entries[rid]

    def find_waiting(self, rid: RequestId) -> PoolEntry | None:
        """The pool's entry of `rid`, if it is in the pool."""
        return self._pool.entries.get(rid)

    @property
    def in_flight(self) -> int:
        """Live requests, queued ones included."""
        return len(self._live)

    @property
    def pool_size(self) -> int:
        return len(self._pool.entries)

    @property
    def left_pool(self) -> int:
        """Entries that have left the pool, since the start."""
        return self._pool.left

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
            self._hit_memo.pop(request.rid, None)  # its prompt may have grown
        self._live[request.rid] = Live(request, prefills=known.prefills if known else 0)

    def _prefill_routed(self, event: ev.PrefillRouted) -> None:
        live, load = self._need(event.rid, LiveStage.QUEUED, LiveStage.POOL), self._need_worker(event.worker)
        decode_worker = event.worker if event.colocated else None
        self._move(live, LiveStage.PREFILL, prefill_worker=event.worker, decode_worker=decode_worker)
        live.prefills += 1
        load.unreported += 1
        self._last_chosen["prefill"] = event.worker

    def _prefill_done(self, event: ev.PrefillDone) -> None:
        live = self._need(event.rid, LiveStage.PREFILL)
        if live.colocated or live.prefill_worker is None:
            raise ev.StaleEvent(f"request {event.rid} is colocated or its worker is gone: no hand-over")
        self._move(live, LiveStage.POOL, prefill_worker=live.prefill_worker)
        self._enter_pool(live, event.now_s, event.lease_until_s, event.kv_bytes, event.cached_tokens)

    def _enter_pool(self, live: Live, now_s: float, lease_until_s: float, kv_bytes: int, cached: int) -> None:
        assert live.prefill_worker is not None
        group = self._loads[live.prefill_worker].up.group
        entry = PoolEntry(live.request, live.prefill_worker, group, now_s, lease_until_s, kv_bytes, cached)
        self._pool.add(entry)

    def _decode_routed(self, event: ev.DecodeRouted) -> None:
        live, load = self._need(event.rid, LiveStage.POOL), self._need_worker(event.worker)
        self._move(live, LiveStage.TRANSFER, prefill_worker=live.prefill_worker, decode_worker=event.worker)
        load.unreported += 1
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
        self._grow(live, event.tokens)

    def _progressed_many(self, event: ev.ProgressedMany) -> None:
        lives, loads, decode = self._live, self._loads, LiveStage.DECODE
        grown: dict[WorkerId, list[Growth]] = {}  # of the requests with a forecast
        for rid, tokens in event.items:
            live = lives.get(rid)
            if live is None or live.stage is not decode or tokens < live.tokens:
                try:  # its first: it is admitted by this, or refused
                    self._progressed(ev.Progressed(event.now_s, rid, tokens))
                except ev.StaleEvent:
                    self.refused_items += 1
                continue
            before, worker = live.tokens, live.decode_worker
            live.tokens = tokens
            if worker is not None:
                loads[worker].kv_tokens += tokens - before
                if worker not in grown:
                    grown[worker] = []
                if live.finishes_at_tokens is not None:
                    grown[worker].append((live, before, tokens))
        self._dirty.update(grown)
        for worker, growths in grown.items():
            if growths:
                loads[worker].departures.grew(growths)

    def _grow(self, live: Live, tokens: int) -> None:
        """A decoding request has generated so many tokens: only its worker's KV and its departure change."""
        before, live.tokens = live.tokens, tokens
        if live.decode_worker is not None:  # else it died: what it did before may still be told
            load = self._loads[live.decode_worker]
            load.kv_tokens += tokens - before
            if live.finishes_at_tokens is not None:
                load.departures.grew([(live, before, tokens)])
            self._dirty.add(live.decode_worker)

    def _forecast_made(self, event: ev.ForecastMade) -> None:
        live = self._need(event.rid)
        finishes_in = event.finishes_in_tokens
        if finishes_in is not None and not (math.isfinite(finishes_in) and finishes_in >= 0):
            raise ValueError(
                f"request {event.rid}: forecast of {finishes_in} tokens; must be finite, >= 0, or None"
            )
        at_tokens = event.tokens / live.request.slots
        self._forecast(live, None if finishes_in is None else at_tokens + finishes_in)

    def _forecast(self, live: Live, finishes_at_tokens: float | None) -> None:
        load = self._loads.get(live.decode_worker) if live.decode_worker else None
        if load is not None and live.finishes_at_tokens is not None:
            load.departures.book(live, -1)
        live.finishes_at_tokens = finishes_at_tokens
        if load is not None:
            if finishes_at_tokens is not None:
                load.departures.book(live, +1)
            self._dirty.add(load.up.worker)

    def _oracle_refreshed(self, event: ev.OracleRefreshed) -> None:
        self._oracle = event.oracle

    def _kv_batch(self, event: ev.KvBatch) -> None:
        index = self._index_of(event.worker)
        index.apply(event.worker, event.epoch, event.seq, event.changes)

    def _kv_snapshot(self, event: ev.KvSnapshot) -> None:
        index = self._index_of(event.worker)
        index.restore(event.worker, event.epoch, event.next_seq, event.chains)

    def _index_of(self, worker: WorkerId) -> PrefixIndex:
        group = self._need_worker(worker).up.group
        if group not in self._prefix:
            self._prefix[group] = PrefixIndex()
        return self._prefix[group]

    def _closed(self, event: ev.Closed) -> None:
        self._move(self._need(event.rid), LiveStage.QUEUED)
        del self._live[event.rid]
        self._hit_memo.pop(event.rid, None)

    def _adopted(self, event: ev.Adopted) -> None:
        rid = event.request.rid
        if rid in self._live:
            raise ev.StaleEvent(f"request {rid} is known already")
        live = Live(event.request, tokens=event.tokens, prefills=1)
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
            self._loads[event.worker] = Load(event, event.health)
        else:
            if load.up.group != event.group and load.up.group in self._prefix:
                self._prefix[load.up.group].drop(event.worker)
            load.up, load.health = event, event.health
        self._dirty.add(event.worker)
        self.fleet_version += 1

    def _engine_down(self, event: ev.EngineDown) -> None:
        worker = event.worker
        group = self._need_worker(worker).up.group
        if group in self._prefix:
            self._prefix[group].drop(worker)
        del self._loads[worker]
        self._dirty.add(worker)
        self.fleet_version += 1
        for live in self._live.values():
            # the charges died with the worker's record: the request must not give them back to a successor of that name
            if live.prefill_worker == worker:
                live.prefill_worker = None
            if live.decode_worker == worker:
                self._book_transfer(live, -1)  # it hangs on the sender, who may live
                live.decode_worker = None
            if live.prefill_worker is None:
                self._pool.remove(live.request.rid)

    def _engine_status(self, event: ev.EngineStatus) -> None:
        load = self._need_worker(event.worker)
        foreign = max(0, event.kv_tokens - load.kv_tokens)
        if foreign < load.foreign_kv_tokens:
            self._eased.add(event.worker)
        if event.health is not load.health:
            self.fleet_version += 1
        load.status, load.health, load.foreign_kv_tokens = event, event.health, foreign
        load.unreported = 0
        load.reports.append((event, load.sending))
        while load.reports[0][0].now_s < event.now_s - INDICATOR_WINDOW_S:
            load.reports.popleft()
        load.indicators = mean_indicators(load.reports)
        self._dirty.add(event.worker)

    # --------------------------------------------------------------------------------------------------- charges

    def _need(self, rid: RequestId, *stages: LiveStage) -> Live:
        live = self._live.get(rid)
        if live is None:
            raise ev.StaleEvent(f"request {rid} is not known (closed, or from before a restart)")
        if stages and live.stage not in stages:
            raise ev.StaleEvent(f"request {rid} is in stage {live.stage.value}: the event does not fit")
        return live

    def _need_worker(self, worker: WorkerId) -> Load:
        load = self._loads.get(worker)
        if load is None:
            raise ev.StaleEvent(f"worker {worker} is not known")
        return load

    def _move(
        self,
        live: Live,
        stage: LiveStage,
        prefill_worker: WorkerId | None = None,
        decode_worker: WorkerId | None = None,
    ) -> None:
        """The one way to change a request's stage or workers: old charges off, new ones on."""
        if live.prefill_worker and (live.stage is LiveStage.PREFILL or prefill_worker != live.prefill_worker):
            self._eased.add(live.prefill_worker)
        if live.decode_worker and decode_worker != live.decode_worker:
            self._eased.add(live.decode_worker)
        self._book(live, -1)
        if live.stage is LiveStage.POOL:
            self._pool.remove(live.request.rid)
        if stage in (LiveStage.QUEUED, LiveStage.PREFILL):
            live.tokens, live.finishes_at_tokens = 0, None
        live.stage, live.prefill_worker, live.decode_worker = stage, prefill_worker, decode_worker
        self._book(live, +1)

    def _book(self, live: Live, sign: int) -> None:
        """Adds (+1) or takes back (-1) what `live` charges now, by the table in the module's docstring."""
        stage, request = live.stage, live.request
        prefill = self._loads.get(live.prefill_worker) if live.prefill_worker else None
        decode = self._loads.get(live.decode_worker) if live.decode_worker else None
        if prefill is not None:
            prefill.kv_tokens += sign * request.prompt_tokens
            if stage is LiveStage.PREFILL:
                prefill.prefilling += sign
                prefill.prefilling_tokens += sign * request.prompt_tokens
            elif stage is LiveStage.POOL or stage is LiveStage.TRANSFER:
                prefill.sending += sign
                self._book_transfer(live, sign)
            self._dirty.add(prefill.up.worker)
        if decode is not None:
            decode.slots_used += sign * request.slots
            if decode is not prefill:  # a colocated prompt is charged once
                decode.kv_tokens += sign * (request.prompt_tokens + live.tokens)
            if live.finishes_at_tokens is not None:
                decode.departures.book(live, sign)
            self._dirty.add(decode.up.worker)

    def _book_transfer(self, live: Live, sign: int) -> None:
        sender = self._loads.get(live.prefill_worker) if live.prefill_worker else None
        if sender is None or live.stage is not LiveStage.TRANSFER or live.decode_worker is None:
            return
        key = (live.decode_worker, live.request.priority)
        count = sender.transfers.get(key, 0) + sign
        if count:
            sender.transfers[key] = count
        else:
            del sender.transfers[key]
        sender.transfers_view = None
        self._dirty.add(sender.up.worker)


_HANDLERS: dict[type, Callable[[ClusterState, Any], None]] = {
    ev.Arrived: ClusterState._arrived,
    ev.PrefillRouted: ClusterState._prefill_routed,
    ev.PrefillDone: ClusterState._prefill_done,
    ev.DecodeRouted: ClusterState._decode_routed,
    ev.Admitted: ClusterState._admitted,
    ev.Progressed: ClusterState._progressed,
    ev.ProgressedMany: ClusterState._progressed_many,
    ev.ForecastMade: ClusterState._forecast_made,
    ev.OracleRefreshed: ClusterState._oracle_refreshed,
    ev.KvBatch: ClusterState._kv_batch,
    ev.KvSnapshot: ClusterState._kv_snapshot,
    ev.Closed: ClusterState._closed,
    ev.EngineUp: ClusterState._engine_up,
    ev.EngineDown: ClusterState._engine_down,
    ev.EngineStatus: ClusterState._engine_status,
    ev.Adopted: ClusterState._adopted,
    ev.PoliciesChanged: lambda state, event: None,  # the dispatcher's
    ev.Tick: lambda state, event: None,
}


def role_of(name: str) -> Role:
    """The Role of a name from the wire or a config. Raises ValueError naming the allowed ones."""
    try:
        return Role(name)
    except ValueError:
        raise ValueError(f"role {name!r}: allowed are {', '.join(role.value for role in Role)}") from None


__all__ = ["INDICATOR_WINDOW_S", "ClusterState", "LiveStage", "PoolKey", "pool_key", "role_of"]
