"""The figures of router and engines, which every ingress and the dashboard show as the router last reported them.

Router and engines report numbers by name (`FleetStatus.gauges` and `.totals`, `Status.totals`). `ROUTER` and `ENGINES`
say what each name means, so a new figure needs one row here and the code that counts it. A name without a row is shown
all the same, because a router or engine of a newer version may report it during an upgrade.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from actors.wire.messages import EngineInfo, FleetStatus
from app.fleet.metric import Metric, counter, gauge, seconds

_ENGINE = ("engine", "role")

HERE = (
    gauge("sluice_router_connected", "0 or 1", "Whether this process is connected to a router."),
    gauge("sluice_ready", "0 or 1", "Whether this replica can serve requests, as `/health/ready` says."),
    seconds("sluice_router_decision_seconds", "Time that the router took for one decision.", ()),
)
"""Metrics that do not come from a reported name. The router sends the bounds of the histogram's buckets."""


def _listed(whose: str, make: Callable[..., Metric], end: str, *rows: tuple[str, ...]) -> dict[str, Metric]:
    """Returns the metrics of `rows` by reported name. A row has the name, the unit, the help text and perhaps labels.

    In a row with labels the name is a pattern, whose groups match the labels' values in this order.
    """
    own = _ENGINE if whose == "engine" else ()
    return {
        name: make(f"sluice_{whose}_{_LABEL.sub('', name)}{end}", unit, text, *own, *labels)
        for name, unit, text, *labels in rows
    }


_LABEL = re.compile(r"_?\([^)]+\)")

ROUTER: dict[str, Metric] = _listed(
    "router", gauge, "",
    ("queued", "prompts", "Prompts that wait for a prefill worker."),
    ("pool", "prompts", "Finished prefills that wait for a decode worker."),
    ("queued_sequences", "sequences", "Sequences of the prompts that wait for a prefill worker."),
    ("queued_tokens", "tokens", "Tokens of the prompts that wait for a prefill worker."),
    ("queue_limit", "sequences",
        "Most sequences whose prompts may wait for a prefill worker (`router.dispatch.max_queue`)."),
    ("queue_limit_tokens", "tokens",
        "Most tokens of prompts that may wait for a prefill worker (`router.dispatch.max_queue_tokens`); "
        "absent without this bound."),
    ("pool_oldest_seconds", "seconds", "Time for which the oldest finished prefill has waited in the prompt pool."),
    ("pool_lease_used_ratio", "share of 1",
        "Largest share of the lease of a finished prefill in the pool that has passed since it was granted or last "
        "renewed. Leases are renewed at a third; from two thirds on a prompt is overdue."),
    ("in_flight", "prompts", "Prompts that the router has in any stage."),
    ("leases", "leases", "Prompts whose KV is held under a lease on a prefill worker."),
    (r"load_regime_(\w+)", "0 or 1",
        "Whether this is the load regime of the fleet (FlowKV): `normal`, `imbalanced` or `extreme`.", "regime"),
    (r"load_score_(\w+)", "load score",
        "Mean load score of the nodes of a role: 0 is idle, about 1 is full, more means a queue.", "role"),
    (r"lead_seconds_(\w+)", "seconds",
        "Time that a way to more capacity takes, by which the autoscaler plans: `start` of a replica, `activate` of a "
        "warm engine, `switch` of a role. It is the 0.9 quantile of the last 64 ones, and a guess before the first.",
        "way"),
    (r"start_step_seconds_(\w+)", "seconds",
        "Time of each step in which replicas start, the 0.9 quantile of the last 64 starts that the autoscaler knows: "
        "`reserve` (placement, the replica's process), `process` (the engine's processes and imports), `weights`, "
        "`post_load` (KV blocks, a dummy request), `announce`.", "step"),
    ("engine_silence_seconds_max", "seconds",
        "Time since the last report of the engine that has been silent longest; engines report every second."),
    ("warm_engines", "engines", "Engines that wait warm, as the autoscaler sees them."),
    ("warm_wanted", "engines", "Engines that the autoscaler wants to wait warm."),
    ("replicas_wanted", "replicas", "Replicas of engines that Ray Serve is asked for, over all groups."),
    ("replica_start_seconds_max", "seconds",
        "Time for which the replica that has been starting longest has had no engine at the router; 0 without one."),
    (r"prewarmed_processes_(\w+)", "processes",
        "Pre-warmed processes of all nodes that are `waiting` for a start or still `importing`, and those that were "
        "`taken` by a start or `died` before, as far as the keepers that run know.", "state"),
    (r"tenants_waiting_(\w+)", "tenants",
        "Tenants whose requests wait in the `queue` before prefill or in the `pool` of computed prompts, each once for "
        "every class; with the fairness policy `none` all are one.", "place"),
    ("load_idle_workers", "workers", "Workers that are idle enough to take on the other role."),
    ("prefix_index_blocks", "blocks", "KV blocks in the prefix indexes."),
    ("prefix_index_bytes", "bytes", "Memory that the prefix indexes take."),
    ("prefix_index_feeds", "workers", "Workers whose KV events are followed."),
    ("network_source", "level",
        "Best network data in use: 0 none, 1 static tiers, 2 congestion of tiers, 3 estimates of pairs of nodes."),
    ("network_pairs", "pairs", "Pairs of nodes with an estimate that is not stale."),
    ("network_pair_age_seconds_min", "seconds", "Age of the newest estimate of a pair of nodes."),
    ("network_pair_age_seconds_max", "seconds", "Age of the oldest estimate of a pair of nodes that is not stale."),
    (r"network_tier(\d+)_bytes_per_second", "bytes per second", "Configured bandwidth of a tier.", "tier"),
    (r"network_tier(\d+)_congestion", "share of 1", "Share of a tier's bandwidth that other traffic uses.", "tier"),
    (r"network_tier(\d+)_estimated_bytes_per_second", "bytes per second",
        "Bandwidth of a tier as learnt from the transfers between its pairs of nodes.", "tier"),
    (r"network_tier(\d+)_slowdown_(own|fleet|ends|shared)_(\d+)", "1",
        "Factor by which transfers of ours in flight prolong one more on a tier, as `netkv` has learnt it: by a form "
        "of its parameter `contention`, with `others` in flight of each kind that the form counts (0 and 8).",
        "tier", "form", "others"),
    (r"network_tier(\d+)_slowdown_transfers", "transfers",
        "Ended transfers of a tier from which these factors were learnt: those of the last minute, at most 256.",
        "tier"),
    ("flow_agents", "agents", "Agents of nodes that permit KV transfers and are connected to the router."),
    ("flow_open", "flows", "KV flows that the agents hold or have permitted."),
    ("flow_held", "flows", "KV flows that wait for a permit with nothing on its way."),
    ("flow_workers", "workers", "Workers that read KV by the agents' permits."),
    ("flow_unscheduled_share", "share of 1",
        "Share of the KV reads of all engines of which a part was posted without a permit, by the engines' own totals, "
        "which also count while an agent is dead."),
    ("predictor_model_in_use", "0 or 1", "Whether the predictor uses a fitted model."),
    ("predictor_running_forecasts", "requests", "Running requests whose forecast is kept up to date."),
    ("predictor_window_tokens", "tokens", "Window H of the forecasts: the horizon of the decode policy if it has one."),
    ("predictor_drift_psi", "1", "Population stability index of recent lengths against the fitted ones."),
    ("predictor_drift_ks", "1", "Kolmogorov-Smirnov distance of recent lengths from the fitted ones."),
    ("predictor_calibration_error", "share of 1", "Mean gap of forecast and observed probabilities."),
) | _listed(
    "router", counter, "_total",
    (r"decisions_(\w+)", "decisions",
        "Decisions of the router: `prefill`, `prefill_colocated`, `prefill_degraded` (by a decode worker, because "
        "there is no prefill worker), `decode_` and the policy's reason, `reject_` and that of the dispatcher or "
        "of the admission policy (`ttft_objective`, `tpot_objective`, `late`).", "decision"),
    ("turns_among_tenants", "decisions",
        "Decisions for which requests of several tenants waited in the same class, or of several classes that share, "
        "so that their shares said whose turn it was; 0 with the fairness policy `none`."),
    ("raised_by_age", "changes",
        "Changes of a request's priority to that of a more urgent class, because it had waited long "
        "(`router.dispatch.class_ageing_s`)."),
    (r"quarantines_(\w+)", "quarantines",
        "Quarantines of workers that began, by reason: `failing`, or the figure by which a worker was slow "
        "(`slow_prefill`, `slow_admission`, `slow_decode`).", "reason"),
    ("quarantine_probes_failed", "probes", "Probes after which a worker remained in quarantine."),
    ("stale_events", "messages",
        "Messages about attempts that the router did not know (any more) or whose stage did not admit them."),
    ("policy_errors", "errors",
        "Decisions in which a policy broke its contract (a cost that is NaN, a dead worker) or raised an exception, "
        "after which the request was rejected with 500; each one is a bug."),
    ("internal_errors", "errors",
        "Faults of the router itself that were logged and survived; each one is a bug."),
    ("protocol_errors", "connections",
        "Connections to the router that ended because a message could not be taken: its kind is unknown, its shape is "
        "wrong, or its handler failed."),
    ("role_switches", "orders", "Orders to an engine to serve another role, or its own again (FlowKV's role switch)."),
    ("assignments", "orders", "Orders of the autoscaler to an engine about its role and duty that were passed on."),
    (r"silent_peers_(\w+)", "connections",
        "Connections that the router ended because nothing came from the peer, or it read nothing, for some seconds.",
        "peer"),
    (r"traces_(\w+)", "decisions",
        "Decisions about sampled requests by what became of their spans: `exported`, `failed` (the collector did not "
        "take them) or `dropped` (too many waited).", "result"),
    ("prefix_index_refused_blocks", "blocks",
        "KV blocks that the prefix indexes did not take because they were full."),
    ("kv_event_batches", "batches", "Batches of KV events that the prefix indexes took in."),
    ("kv_event_gaps", "gaps", "Gaps in the numbering of an engine's batches of KV events."),
    ("kv_event_replays", "requests", "Requests to an engine to send missing batches of KV events again."),
    ("kv_event_snapshots", "snapshots", "Full snapshots of an engine's KV blocks that the prefix indexes took in."),
    ("prefill_hit_tokens_predicted", "tokens",
        "Prompt tokens that the chosen prefill worker had cached according to the prefix index."),
    ("prefill_hit_tokens_reported", "tokens",
        "Prompt tokens that the chosen prefill worker itself reported as cached."),
    ("network_transfers", "transfers", "KV transfers from which the bandwidth estimator learnt."),
    ("network_transfer_bytes", "bytes", "KV bytes of the transfers from which the bandwidth estimator learnt."),
    ("network_transfer_descriptors", "descriptors", "Descriptors of the KV transfers that the router heard of."),
    ("network_transfers_unusable", "transfers",
        "KV transfers that the estimator could not use: unknown engines, no bytes, or an impossible duration."),
    ("network_refreshes", "changes", "Times that the policies were given new network data."),
    ("network_errors", "errors", "Failures to read or refresh the network data."),
    ("flow_submitted", "flows", "KV flows that workers submitted to agents; one is counted again after a reconnect."),
    ("flow_permits", "permits", "Permits that agents gave."),
    (r"flow_bytes_level_(\d+)", "bytes", "Bytes that agents permitted at a level; 1 is the highest.", "level"),
    ("flow_moved_bytes", "bytes", "Bytes of ended KV flows, with and without permits."),
    ("flow_held_seconds", "seconds", "Time in which ended KV flows waited for permits and moved nothing."),
    (r"flow_held_seconds_level_(\d+)", "seconds",
        "Time in which ended KV flows waited for permits and moved nothing, by the level at which they were permitted "
        "last.", "level"),
    ("flow_ended", "flows", "KV flows that ended."),
    (r"flow_ended_level_(\d+)", "flows",
        "KV flows that agents took and that ended, by the level at which they were permitted last.", "level"),
    ("flow_withdrawn", "flows", "KV flows that their workers withdrew: the request was aborted or a read failed."),
    ("flow_lost", "flows", "Open KV flows of workers that were lost."),
    ("flow_refused", "flows",
        "KV flows that an agent refused, because it held too many or could not find out in time whether their nodes "
        "exist."),
    (r"flow_unscheduled_reads_(\w+)", "flows",
        "KV reads of which workers posted a part without a permit, by reason: `no_agent` (none was connected when the "
        "read began), `silent` and `agent_lost` (nothing was heard from the agent), `bound` (the lease or the request "
        "would have ended), `refused`.", "reason"),
    ("flow_unscheduled_bytes", "bytes", "Bytes that workers posted without a permit."),
    (r"flow_alone_reads_(\w+)", "flows",
        "KV reads from another node whose agent was not asked for permits, by reason: `no_agent` (not connected), "
        "`silent`, `agent_lost`, `refused`; the reader's agent ordered them alone.", "reason"),
    ("flow_late_chunks", "chunks",
        "Chunks that gave up their slots at both ports, because nothing of them had arrived in time "
        "(`flow.options.arbiter.late_s`)."),
    ("flow_returned_permits", "permits",
        "Permits of another node's agent that were given back because the reader's own port was full."),
    (r"flow_lent_(\w+)", "count",
        "What an agent did for other nodes' agents, which share its egress port: its totals by their names.", "what"),
    ("flow_protocol_errors", "connections", "Connections of workers that an agent ended because of a bad message."),
    ("predictor_outcomes", "requests", "Ended requests from which the predictor learnt."),
    ("predictor_outcomes_censored", "requests",
        "Ended requests of which only a lower bound of the length is known, such as cancelled ones."),
    ("predictor_outcomes_dropped", "requests", "Outcomes that were dropped because the disk was behind."),
    ("predictor_outcome_write_errors", "errors", "Outcomes that could not be written to the outcome log."),
    ("predictor_predictions", "forecasts", "Forecasts that the predictor was asked for."),
    ("predictor_predictions_abstained", "forecasts",
        "Forecasts that the predictor did not give, because too little was known."),
    ("predictor_models_refused", "models", "Model files that the predictor would not load."),
    ("predictor_refits", "refits", "Refits of the predictor that began."),
    ("predictor_refit_failures", "refits", "Refits of the predictor that failed."),
    ("predictor_promotions", "models", "Refitted models that were put to use."),
    ("journal_records_written", "records", "Records of the journal that were written to disk."),
    ("journal_bytes_written", "bytes", "Bytes of the journal that were written to disk."),
    ("journal_records_dropped", "records", "Records of the journal that were dropped because the disk was behind."),
    ("journal_write_errors", "errors", "Writes of the journal that failed."),
    ("journal_encode_errors", "errors", "Records of the journal that could not be encoded; each one is a bug."),
    ("journal_records_unwritten_at_stop", "records", "Records of the journal that were lost when the router stopped."),
    ("journal_bytes_unwritten_at_stop", "bytes", "Bytes of the journal that were lost when the router stopped."),
)  # fmt: skip
"""Metrics by the name that the router reports; the name of a metric with a label is a pattern."""

ENGINES: dict[str, Metric] = _listed(
    "engine", gauge, "",
    ("slots", "sequences", "Sequences that may decode at the same time."),
    ("kv_blocks", "blocks", "KV blocks that the engine has."),
    ("state", "always 1",
        "The state of the engine (`starting`, `ready`, `stalled`, `quarantined`, `draining` or `down`) and its duty "
        "(`active` or `warm`): each engine has one such series at a time, and those of an earlier state, duty or role "
        "end.", "state", "duty"),
    ("running", "requests", "Requests that compute in the engine."),
    ("waiting", "requests", "Requests that wait inside the engine."),
    ("kv_blocks_used", "blocks", "KV blocks of the engine that are in use."),
    ("kv_usage_ratio", "share of 1", "Share of the engine's KV blocks that is in use."),
    ("leases", "leases", "Finished prefills whose KV waits to be pulled."),
    ("quarantined", "workers",
        "Workers of the engine (its data-parallel ranks, or itself) that the router has in quarantine."),
    (r"start_seconds_(\w+)", "seconds",
        "Time of each step in which the engine has started: `process` (processes and imports), `weights`, `post_load` "
        "(KV blocks, a dummy request), `announce`.", "step"),
    (r"start_weights_bytes_(\w+)", "bytes",
        "Bytes of weights that the start of an engine with `weights_from: peer` read from another engine, by the "
        "source of its weights: `peer`, or `disk` where no engine had them or not all of them came.", "source"),
    (r"start_weights_read_seconds_(\w+)", "seconds",
        "Time in which the engine's start read weights from another engine, or tried to, by the source of its weights: "
        "`peer` or `disk`.", "source"),
) | _listed(
    "engine", counter, "_total",
    ("prefill_tokens", "tokens", "Prompt tokens that the engine computed."),
    ("decode_tokens", "tokens", "Output tokens that the engine generated."),
    ("transfers", "transfers", "KV transfers that the engine pulled."),
    ("transfer_bytes", "bytes", "KV bytes that the engine pulled."),
    ("transfer_s", "seconds", "Durations of the engine's pulls of KV, added up."),
    ("transfer_descriptors", "descriptors", "Descriptors of the engine's pulls of KV."),
    ("transfer_failures", "transfers", "Pulls of KV by the engine that failed."),
    ("transfer_mismatches", "transfers",
        "Pulls of KV whose checksums differed from the lender's; the prompts were prefilled again."),
    ("transfers_unscheduled", "transfers",
        "Pulls of KV of which a part was read without a permit of the node's flow agent."),
    ("leases_expired", "leases", "Leases of the engine that ended before the KV was pulled or released."),
    ("stalls", "stalls", "Times that a core of the engine stood still and its work was moved elsewhere."),
    ("transfers_overdue", "transfers",
        "Pulls of KV by the engine that took too long; their requests failed, and their blocks wait for the end."),
    ("handshakes_refused", "messages", "Messages on NIXL's side channel that were no handshake."),
    ("handshake_restarts", "restarts", "Times that NIXL's side channel was opened again after a failure."),
    ("kv_feed_errors", "errors",
        "Failures of the engine's feed of KV events, after each of which its prefix cache was announced anew."),
    ("preemptions", "preemptions", "Running requests that the engine set back for want of KV blocks."),
    ("collectives", "collectives", "Collectives between the nodes of a sim engine's instance."),
    ("collective_s", "seconds", "Durations of those collectives, added up."),
    ("reuse_wait_s", "seconds", "Time for which layer groups of a sim engine waited for a lent prefix."),
    ("step_s", "seconds", "Durations of the engine's steps, added up, as far as they are known."),
    ("prefill_steps", "steps", "Steps of known duration that computed prompts."),
    ("prefill_step_tokens", "tokens", "Prompt tokens that those steps computed."),
    ("decode_steps", "steps", "Steps of known duration that decoded."),
    ("decode_step_seqs", "sequences", "Sequences of those steps, added up."),
    ("decode_step_kv_tokens", "tokens", "KV tokens of the sequences of those steps, added up."),
    ("weights_lent_bytes", "bytes", "Bytes of weights that the engine lent to engines that started."),
)  # fmt: skip
"""Metrics by the name that an engine reports; totals count from the engine's start."""

_START = r"start_seconds_(\w+)"
_START_WEIGHTS = r"start_weights_bytes_(\w+)", r"start_weights_read_seconds_(\w+)"
_SHOWN_OTHERWISE = frozenset({"kv_blocks_total", "kv_blocks_used", "kv_blocks_free"})
"""Names among an engine's totals that the gauges above show already."""


def all_metrics() -> dict[str, tuple[Metric, ...]]:
    """Returns every metric of this module, by its heading in the documentation."""
    return {"The router": (*HERE, *ROUTER.values()), "The engines": tuple(ENGINES.values())}


class Seen(NamedTuple):
    """The fleet as a process knows it: the facts of its engines, the router's last figures (None before the first),
    whether a router is connected, and whether the process can serve requests (None: it serves none).
    """

    infos: Sequence[EngineInfo]
    status: FleetStatus | None
    connected: bool
    ready: bool | None = None


class FleetCollector(Collector):
    """Collects the figures of engines and router at each scrape, as far as `seen` returns them; a figure that nobody
    has reported yet is left out, and so are those of engines that have gone.
    """

    def __init__(self, seen: Callable[[], Seen]) -> None:
        self._seen = seen

    def collect(self) -> Iterable[Family]:
        """Yields the metric families of one scrape."""
        infos, status, connected, ready = self._seen()
        figures = _Figures()
        figures.add(HERE[0], float(connected))
        if ready is not None:
            figures.add(HERE[1], float(ready))
        for info in infos:
            figures.add(ENGINES["slots"], info.slots, info.id, info.role)
            figures.add(ENGINES["kv_blocks"], info.kv_blocks, info.id, info.role)
            figures.add(ENGINES["state"], 1.0, info.id, info.role, info.state, info.duty)
        if status is not None:
            _add_router(figures, status)
            _add_engines(figures, status, infos)
            yield from _decision_times(status)
        yield from figures.families.values()


class _Figures:
    """The metric families of one scrape by name, in the order of their first figure."""

    def __init__(self) -> None:
        self.families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def family(self, metric: Metric) -> GaugeMetricFamily | CounterMetricFamily:
        """Returns the family of `metric`, which is shown even if no figure is added to it."""
        family = self.families.get(metric.name)
        if family is None:
            make = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family = self.families[metric.name] = make(metric.name, metric.help, labels=metric.labels)
        return family

    def add(self, metric: Metric, value: float, *labels: str) -> None:
        """Adds one figure of `metric`; `labels` are the values of its labels."""
        self.family(metric).add_metric(labels, value)


def router_metric(name: str, kind: str) -> tuple[Metric, tuple[str, ...]]:
    """Returns the metric of a name that the router reported, and the values of its labels.

    `kind` is the type of a metric whose name is unknown: gauge or counter.
    """
    if name in ROUTER:
        return ROUTER[name], ()
    for pattern, found in _PATTERNS:
        match = pattern.fullmatch(name)
        if match is not None:
            return found, match.groups()
    return _unlisted("router", name, kind), ()


_PATTERNS = [(re.compile(name), metric) for name, metric in ROUTER.items() if metric.labels]


def _unlisted(whose: str, name: str, kind: str, *labels: str) -> Metric:
    make, suffix = (gauge, "") if kind == "gauge" else (counter, "_total")
    text = f"The {whose} reports `{name}`, which this version does not know."
    return make(f"sluice_{whose}_{name}{suffix}", "unknown", text, *labels)


def _add_router(figures: _Figures, status: FleetStatus) -> None:
    own = {
        "queued": status.queued,
        "pool": status.pool,
        "in_flight": status.in_flight,
        "leases": status.leases,
    }
    for name, value in [*own.items(), *status.gauges.items()]:
        metric, labels = router_metric(name, "gauge")
        figures.add(metric, float(value), *labels)
    for name, value in sorted(status.totals.items()):
        metric, labels = router_metric(name, "counter")
        figures.add(metric, value, *labels)


def _add_engines(figures: _Figures, status: FleetStatus, infos: Sequence[EngineInfo]) -> None:
    roles = {info.id: info.role for info in infos}
    for metric in ENGINES.values():
        figures.family(metric)
    held = Counter(quarantined.engine_id for quarantined in status.quarantined)
    for info in infos:
        figures.add(ENGINES["quarantined"], held[info.id], info.id, info.role)
        for step in ("process", "weights", "post_load", "announce"):
            took_s = None if info.started is None else getattr(info.started, f"{step}_s")
            if took_s is not None:
                figures.add(ENGINES[_START], took_s, info.id, info.role, step)
        read = None if info.started is None else info.started.weights
        if read is not None:
            for name, value in zip(_START_WEIGHTS, (read.bytes, read.seconds), strict=True):
                figures.add(ENGINES[name], value, info.id, info.role, read.source)
    for one in status.statuses:
        if one.engine_id not in roles:
            continue
        where = (one.engine_id, roles[one.engine_id])
        figures.add(ENGINES["running"], one.running, *where)
        figures.add(ENGINES["waiting"], one.waiting, *where)
        figures.add(ENGINES["kv_blocks_used"], one.kv_blocks_used, *where)
        figures.add(ENGINES["kv_usage_ratio"], one.kv_usage, *where)
        figures.add(ENGINES["leases"], one.leases, *where)
        for name, total in sorted(one.totals.items()):
            if name not in _SHOWN_OTHERWISE:
                figures.add(
                    ENGINES.get(name) or _unlisted("engine", name, "counter", *_ENGINE), total, *where
                )


def _decision_times(status: FleetStatus) -> Iterable[Family]:
    bounds = [repr(bound) for bound in status.decision_bounds_s] + ["+Inf"]
    if len(status.decision_buckets) == len(bounds):
        yield HistogramMetricFamily(
            HERE[2].name,
            HERE[2].help,
            buckets=list(zip(bounds, map(float, status.decision_buckets), strict=True)),
            sum_value=status.decision_sum_s,
        )
