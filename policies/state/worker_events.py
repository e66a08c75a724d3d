"""Events of the workers, of what their caches hold and of the network between them: how each changes the ledger.

Reports of engines are kept for a sliding window (FlowKV B.2).
"""

from policies.state import events as ev
from policies.state.charges import Load
from policies.state.indicators import mean_indicators
from policies.state.ledger import Handlers, Ledger
from policies.state.prefix_index import PrefixIndex
from policies.state.views import WorkerId

INDICATOR_WINDOW_S = 2.0  # ASSUMPTION: FlowKV names a sliding window, not its length; 20 reports of 0.1 s


def _engine_up(ledger: Ledger, event: ev.EngineUp) -> None:
    load = ledger.loads.get(event.worker)
    if load is None:
        ledger.loads[event.worker] = Load(event, event.health)
    else:
        if load.up.group != event.group and load.up.group in ledger.prefix:
            ledger.prefix[load.up.group].drop(event.worker)
        load.up, load.health = event, event.health
    ledger.dirty.add(event.worker)
    ledger.fleet_version += 1


def _engine_down(ledger: Ledger, event: ev.EngineDown) -> None:
    worker = event.worker
    group = ledger.need_worker(worker).up.group
    if group in ledger.prefix:
        ledger.prefix[group].drop(worker)
    del ledger.loads[worker]
    ledger.dirty.add(worker)
    ledger.fleet_version += 1
    for live in ledger.live.values():
        # the charges died with the worker's record: the request must not give them back to a successor of that name
        if live.prefill_worker == worker:
            live.prefill_worker = None
        if live.decode_worker == worker:
            ledger.book_transfer(live, -1)  # it hangs on the sender, who may live
            live.decode_worker = None
        if live.prefill_worker is None:
            ledger.pool.remove(live.request.attempt_id)


def _engine_status(ledger: Ledger, event: ev.EngineStatus) -> None:
    load = ledger.need_worker(event.worker)
    foreign = max(0, event.kv_tokens - load.kv_tokens)
    if foreign < load.foreign_kv_tokens:
        ledger.freed_workers.add(event.worker)
    if event.health is not load.health:
        ledger.fleet_version += 1
    load.status, load.health, load.foreign_kv_tokens = event, event.health, foreign
    load.unreported = 0
    load.reports.append((event, load.sending))
    while load.reports[0][0].now_s < event.now_s - INDICATOR_WINDOW_S:
        load.reports.popleft()
    load.indicators = mean_indicators(load.reports)
    ledger.dirty.add(event.worker)


def _kv_batch(ledger: Ledger, event: ev.KvBatch) -> None:
    index = _index_of(ledger, event.worker)
    index.apply(event.worker, event.epoch, event.seq, event.changes)


def _kv_snapshot(ledger: Ledger, event: ev.KvSnapshot) -> None:
    index = _index_of(ledger, event.worker)
    index.restore(event.worker, event.epoch, event.next_seq, event.chains)


def _index_of(ledger: Ledger, worker: WorkerId) -> PrefixIndex:
    group = ledger.need_worker(worker).up.group
    if group not in ledger.prefix:
        ledger.prefix[group] = PrefixIndex()
    return ledger.prefix[group]


def _oracle_refreshed(ledger: Ledger, event: ev.OracleRefreshed) -> None:
    ledger.oracle = event.oracle


HANDLERS: Handlers = {
    ev.EngineUp: _engine_up,
    ev.EngineDown: _engine_down,
    ev.EngineStatus: _engine_status,
    ev.KvBatch: _kv_batch,
    ev.KvSnapshot: _kv_snapshot,
    ev.OracleRefreshed: _oracle_refreshed,
}
