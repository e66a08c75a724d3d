"""Handlers of the events of workers, of their caches and of the network between them.

The reports of an engine are kept for a sliding window and averaged (FlowKV B.2). A report does not say which of the
engine's requests prefill and which decode, and an engine that has switched roles has both for a while. The router's own
charges at the time of the report say it: they divide each queue in their ratio. This is exact while all requests on a
worker are in one phase. Of a mixture the number in each phase is right, and how many of them run is an estimate.
"""

from collections.abc import Iterable, Sequence

from policies.state import events as ev
from policies.state.charges import Load, Report
from policies.state.ledger import Handlers, Ledger
from policies.state.prefix_index import PrefixIndex
from policies.state.standing import Standing
from policies.state.views import Indicators, Queues, WorkerId

# ASSUMPTION: FlowKV names a sliding window, but not its length; 2 s hold 20 reports, one every 0.1 s
INDICATOR_WINDOW_S = 2.0

# ASSUMPTION: three reports of an agent (`AgentConfig.report_s`), the time after which a silent peer is lost, too
FLOWS_STALE_S = 3.0
"""Age from which the report of a node's flow agent says nothing any more."""


def _engine_up(ledger: Ledger, event: ev.EngineUp) -> None:
    load = ledger.loads.get(event.worker)
    if load is None:
        ledger.appeared(Load(event, event.health, Standing(event.worker, decoding_at_s=event.now_s)))
    else:
        if load.up.group != event.group and load.up.group in ledger.prefix:
            ledger.prefix[load.up.group].drop(event.worker)
        load.up = event
        ledger.set_health(load, event.health)
    ledger.dirty.add(event.worker)
    ledger.fleet_version += 1
    ledger.outliers.fit(event.now_s)


def _engine_down(ledger: Ledger, event: ev.EngineDown) -> None:
    worker = event.worker
    group = ledger.need_worker(worker).up.group
    if group in ledger.prefix:
        ledger.prefix[group].drop(worker)
    ledger.vanished(worker)
    ledger.dirty.add(worker)
    ledger.fleet_version += 1
    ledger.outliers.fit(event.now_s)


def _engine_status(ledger: Ledger, event: ev.EngineStatus) -> None:
    load = ledger.need_worker(event.worker)
    foreign = max(0, event.kv_tokens - load.own_kv_tokens_in_use)
    if foreign < load.foreign_kv_tokens:
        ledger.freed_workers.add(event.worker)
    load.status, load.foreign_kv_tokens = event, foreign
    if event.health is not load.health:
        ledger.set_health(load, event.health)
        ledger.fleet_version += 1
        ledger.outliers.fit(event.now_s)
    load.unreported = load.unreported_prefills = 0
    load.reports.append(Report(event, load.sending, load.prefill_share))
    while load.reports[0].status.now_s < event.now_s - INDICATOR_WINDOW_S:
        load.reports.popleft()
    load.indicators = _mean_indicators(load.reports)
    ledger.dirty.add(event.worker)


def _mean_indicators(reports: Iterable[Report]) -> Indicators:
    """Returns the mean of each figure over the reports that have it.

    FlowKV averages over a window (appendix B.2), because one sample of a bursty engine says little.
    """
    kept = list(reports)
    statuses = [report.status for report in kept]
    prefill = Queues(
        sum(share * s.running for s, _, share in kept) / len(kept),
        sum(share * s.waiting for s, _, share in kept) / len(kept),
        _mean([None if s.swapped is None else share * s.swapped for s, _, share in kept]),
    )
    return Indicators(
        running=sum(s.running for s in statuses) / len(kept),
        waiting=sum(s.waiting for s in statuses) / len(kept),
        swapped=_mean([s.swapped for s in statuses]),
        sending=sum(report.sending for report in kept) / len(kept),
        token_budget=_mean([s.token_budget for s in statuses]),
        compute=_mean([s.compute for s in statuses]),
        memory_bandwidth=_mean([s.memory_bandwidth for s in statuses]),
        prefill=prefill,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _kv_batch(ledger: Ledger, event: ev.KvBatch) -> None:
    index = _index_of(ledger, event.worker)
    index.apply(event.worker, event.epoch, event.seq, event.changes)


def _kv_snapshot(ledger: Ledger, event: ev.KvSnapshot) -> None:
    index = _index_of(ledger, event.worker)
    index.restore(event.worker, event.epoch, event.next_seq, event.chains)
    ledger.cache_known(event.worker)


def _index_of(ledger: Ledger, worker: WorkerId) -> PrefixIndex:
    group = ledger.need_worker(worker).up.group
    if group not in ledger.prefix:
        ledger.prefix[group] = PrefixIndex(ledger.index_memory)
    return ledger.prefix[group]


def _oracle_refreshed(ledger: Ledger, event: ev.OracleRefreshed) -> None:
    ledger.oracle = event.oracle


def _flows_reported(ledger: Ledger, event: ev.FlowsReported) -> None:
    reports = ledger.flow_reports
    for node in [node for node, report in reports.items() if event.now_s - report.now_s > FLOWS_STALE_S]:
        del reports[node]
    reports[event.load.node] = event


HANDLERS: Handlers = {
    ev.EngineUp: _engine_up,
    ev.EngineDown: _engine_down,
    ev.EngineStatus: _engine_status,
    ev.KvBatch: _kv_batch,
    ev.KvSnapshot: _kv_snapshot,
    ev.OracleRefreshed: _oracle_refreshed,
    ev.FlowsReported: _flows_reported,
}
