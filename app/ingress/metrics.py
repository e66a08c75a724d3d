"""What the ingress counts, in Prometheus form, and the fleet's figures as the router last told them.

Histograms are observed once per request, never per token; label children are looked up once. Outcome codes
are HTTP statuses, 499 for a client that left. All times in seconds.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.wire.messages import EngineInfo, FleetStatus

if TYPE_CHECKING:
    from app.ingress.job import Job

disable_created_metrics()  # a `_created` series beside each counter helps nobody here

_LATENCY = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STEP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TRANSFER = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)

_GAUGE_TOTALS = frozenset({"kv_blocks_total", "kv_blocks_used", "kv_blocks_free"})


class IngressMetrics:
    """One registry per ingress replica. `bind` names where the live gauges come from."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        reg = self.registry
        self._requests = Counter(
            "sluice_requests_total", "Answered requests", ["code", "class", "model"], registry=reg
        )
        self._children: dict[tuple[int, str], Counter] = {}
        self.ttft = Histogram("sluice_ttft_seconds", "Receipt to first token", registry=reg, buckets=_LATENCY)
        self.tpot = Histogram(
            "sluice_tpot_seconds", "Time per output token after the first", registry=reg, buckets=_STEP
        )
        self.e2e = Histogram(
            "sluice_e2e_seconds", "Receipt to the end of the answer", registry=reg, buckets=_LATENCY
        )
        self.queue = Histogram(
            "sluice_queue_seconds",
            "Wait before prefill, at router and engine",
            registry=reg,
            buckets=_LATENCY,
        )
        self.prefill = Histogram("sluice_prefill_seconds", "Prefill compute", registry=reg, buckets=_LATENCY)
        self.pool_wait = Histogram(
            "sluice_pool_wait_seconds",
            "Wait in the prompt pool for a decode engine",
            registry=reg,
            buckets=_LATENCY,
        )
        self.transfer = Histogram(
            "sluice_transfer_seconds", "KV transfer of one request", registry=reg, buckets=_TRANSFER
        )
        self.decode = Histogram(
            "sluice_decode_seconds", "First token to last", registry=reg, buckets=_LATENCY
        )
        self.prompt_tokens = Counter(
            "sluice_prompt_tokens_total", "Prompt tokens of finished requests", registry=reg
        )
        self.generation_tokens = Counter(
            "sluice_generation_tokens_total", "Tokens sent to clients", registry=reg
        )
        self.kv_transfers = Counter("sluice_kv_transfers_total", "KV transfers between engines", registry=reg)
        self.kv_bytes = Counter(
            "sluice_kv_transfer_bytes_total", "KV bytes moved between engines", registry=reg
        )
        self.kv_seconds = Counter("sluice_kv_transfer_seconds_total", "Seconds of KV transfers", registry=reg)
        self.kv_descriptors = Counter(
            "sluice_kv_transfer_descriptors_total", "Descriptors of KV transfers", registry=reg
        )
        self.transfer_failures = Counter(
            "sluice_kv_transfer_failures_total", "KV transfers that failed", registry=reg
        )
        self.retries = Counter(
            "sluice_retries_total",
            "Attempts repeated before the first token",
            ["stage", "reason"],
            registry=reg,
        )
        self.fallbacks = Counter(
            "sluice_fallback_decisions_total",
            "Decisions made here for want of a router",
            ["stage"],
            registry=reg,
        )
        self.refused_events = Counter(
            "sluice_refused_events_total",
            "Messages that came too late for their request's state",
            registry=reg,
        )
        self.slow_clients = Counter(
            "sluice_slow_clients_total", "Streams cut because their client did not read", registry=reg
        )
        self.internal_errors = Counter(
            "sluice_internal_errors_total", "Failures of our own that were logged and survived", registry=reg
        )
        self._in_flight = Gauge("sluice_in_flight", "Requests that this replica serves now", registry=reg)

    def bind(
        self,
        in_flight: Callable[[], float],
        router_connected: Callable[[], bool],
        fleet: Callable[[], tuple[list[EngineInfo], FleetStatus | None]],
    ) -> None:
        """Sets the sources of the gauges; once, when the application is put together."""
        self._in_flight.set_function(in_flight)
        self.registry.register(_FleetCollector(fleet, router_connected))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def answered(self, code: int, request_class: str) -> None:
        """Counts one answered HTTP request; call exactly once per request."""
        child = self._children.get((code, request_class))
        if child is None:
            child = self._children[code, request_class] = self._requests.labels(
                str(code), request_class, self._model
            )
        child.inc()

    def job_admitted(self, job: "Job") -> None:
        """The KV is at the decode engine: counts its transfer, if there was one."""
        times = job.times
        if job.handle is not None:
            self.kv_transfers.inc()
            self.kv_bytes.inc(times.transfer_bytes)
            self.kv_seconds.inc(times.transfer_s or 0.0)
            self.kv_descriptors.inc(times.descriptors)
            self.transfer.observe(times.transfer_s or 0.0)

    def job_closed(self, job: "Job", outcome: str) -> None:
        """Observes the stages of a finished job; others would mix unlike things."""
        self.generation_tokens.inc(job.output_tokens)
        if outcome != "finished":
            return
        times = job.times
        self.prompt_tokens.inc(len(job.work.tokens))
        if times.routed_s is not None:
            self.queue.observe(times.routed_s - times.submitted_s + times.engine_queue_s)
        if times.prefill_s is not None:
            self.prefill.observe(times.prefill_s)
        if times.pooled_s is not None and times.decode_routed_s is not None:
            self.pool_wait.observe(times.decode_routed_s - times.pooled_s)
        if times.first_s is not None and times.last_s is not None:
            decode_s = times.last_s - times.first_s
            self.decode.observe(decode_s)
            per_choice = job.output_tokens / job.work.choices
            if per_choice > 1:
                self.tpot.observe(decode_s / (per_choice - 1))


class _FleetCollector(Collector):
    """Engines and router as `FleetStatus` last had them; nothing is shown before the first."""

    def __init__(
        self,
        fleet: Callable[[], tuple[list[EngineInfo], FleetStatus | None]],
        router_connected: Callable[[], bool],
    ) -> None:
        self._fleet = fleet
        self._router_connected = router_connected

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "sluice_router_connected",
            "1 while this replica has a router",
            value=float(self._router_connected()),
        )
        infos, status = self._fleet()
        slots = GaugeMetricFamily(
            "sluice_engine_slots", "Sequences that may decode at once", labels=["engine", "role"]
        )
        blocks = GaugeMetricFamily(
            "sluice_engine_kv_blocks", "KV blocks of the engine", labels=["engine", "role"]
        )
        for info in infos:
            slots.add_metric([info.id, info.role], info.slots)
            blocks.add_metric([info.id, info.role], info.kv_blocks)
        yield slots
        yield blocks
        if status is not None:
            yield from _router(status)
            yield from _engines(status, {info.id: info.role for info in infos})


def _router(status: FleetStatus) -> Iterable[Metric]:
    gauges: dict[str, float] = {
        "queued": status.queued,
        "pool": status.pool,
        "in_flight": status.in_flight,
        "leases": status.leases,
        **status.gauges,
    }
    for name, value in gauges.items():
        yield GaugeMetricFamily(
            f"sluice_router_{name}", f"{name.replace('_', ' ')} at the router", value=float(value)
        )
    for name, value in sorted(status.totals.items()):
        yield CounterMetricFamily(
            f"sluice_router_{name}", f"{name.replace('_', ' ')} of the router", value=value
        )
    bounds = [repr(bound) for bound in status.decision_bounds_s] + ["+Inf"]
    if len(status.decision_buckets) == len(bounds):
        yield HistogramMetricFamily(
            "sluice_router_decision_seconds",
            "Time of one routing decision",
            buckets=list(zip(bounds, map(float, status.decision_buckets), strict=True)),
            sum_value=status.decision_sum_s,
        )


def _engines(status: FleetStatus, roles: dict[str, str]) -> Iterable[Metric]:
    labels = ["engine", "role"]
    families: dict[str, Metric] = {
        name: GaugeMetricFamily(f"sluice_engine_{name}", text, labels=labels)
        for name, text in (
            ("running", "Requests that compute"),
            ("waiting", "Requests that wait inside the engine"),
            ("kv_blocks_used", "KV blocks in use"),
            ("kv_usage_ratio", "KV use, 0 to 1"),
            ("leases", "Finished prefills whose KV waits to be pulled"),
        )
    }
    for one in status.statuses:
        where = [one.engine_id, roles.get(one.engine_id, "unknown")]
        values: list[float] = [one.running, one.waiting, one.kv_blocks_used, one.kv_usage, one.leases]
        for family, value in zip(list(families.values())[:5], values, strict=True):
            family.add_metric(where, value)  # type: ignore[attr-defined]
        for name, total in sorted(one.totals.items()):
            if name not in _GAUGE_TOTALS:
                key = f"total:{name}"
                if key not in families:
                    text = f"{name.replace('_', ' ')} since the engine's start"
                    families[key] = CounterMetricFamily(f"sluice_engine_{name}", text, labels=labels)
                families[key].add_metric(where, total)  # type: ignore[attr-defined]
    yield from families.values()
