"""The figures that an ingress counts itself, in Prometheus form.

`INGRESS` lists them, `app.fleet.figures` lists those of router and engines, and `docs/metrics.md` is generated
from both (`python scripts/document_metrics.py`). A new metric needs one entry here, one attribute of `IngressMetrics`,
and the code that counts it.

Histograms are observed once per request and never per token.
"""

import asyncio
import contextlib
from collections.abc import Callable, Set

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    generate_latest,
)

from actors.wire.messages import Figures
from app.fleet.metric import LATENCY_S, STEP_S, TRANSFER_S, Metric, counter, gauge, seconds
from app.fleet.moved import MOST_PAIRS, PAIR, PAIR_BYTES, PAIR_TRANSFERS, TIER, TIER_BYTES, TIER_TRANSFERS
from app.ingress.loop_metrics import LoopCounter, LoopHistogram
from app.ingress.moved import MovedCounts
from policies.request.ended import RequestEnd, Result
from policies.request.events import Admitted
from policies.request.life import Life
from policies.request.stage import Outcome

INGRESS: tuple[Metric, ...] = (
    counter(
        "sluice_requests_total",
        "requests",
        "HTTP requests that were answered; code 499 is a client that left before its answer was complete, and class "
        "`none` a request that was refused before its class was known.",
        "code", "class", "model",
    ),
    gauge("sluice_in_flight", "requests", "Requests for output that this replica is answering now."),
    seconds(
        "sluice_ttft_seconds",
        "Time from the receipt of a request to the first token of its answer.",
        LATENCY_S, "class",
    ),
    seconds(
        "sluice_tpot_seconds",
        "Mean time per output token after the first, for each finished prompt, however many engines served it.",
        STEP_S, "class",
    ),
    seconds(
        "sluice_e2e_seconds",
        "Time from the receipt of a request to the end of its answer, for answers with 200.",
        LATENCY_S, "class",
    ),
    counter(
        "sluice_slo_requests_total",
        "requests",
        "Prompts with a latency objective that ended, by class and result: `met`, `ttft` or `tpot` (the objective that "
        "was missed, TTFT if both were), `rejected`, `expired`, `failed`. A client that left counts nowhere.",
        "class", "result",
    ),
    seconds("sluice_queue_seconds", "Time that a prompt waited for its prefill, at the router and inside the engine."),
    seconds("sluice_prefill_seconds", "Time that an engine took to compute a prompt."),
    seconds("sluice_pool_wait_seconds", "Time that a finished prefill waited in the prompt pool for a decode engine."),
    seconds("sluice_transfer_seconds", "Time that the KV of one prompt took from engine to engine.", TRANSFER_S),
    seconds("sluice_decode_seconds", "Time from the first to the last token of a prompt that finished."),
    counter("sluice_prompt_tokens_total", "tokens", "Prompt tokens of prompts that finished."),
    counter("sluice_generation_tokens_total", "tokens", "Output tokens that engines sent."),
    counter("sluice_kv_transfers_total", "transfers", "KV transfers between engines that succeeded."),
    counter("sluice_kv_transfer_bytes_total", "bytes", "KV bytes that were moved between engines."),
    counter("sluice_kv_transfer_seconds_total", "seconds", "Durations of all KV transfers, added up."),
    counter(
        "sluice_kv_transfer_descriptors_total",
        "descriptors",
        "Descriptors of all KV transfers; a descriptor is one contiguous piece of memory.",
    ),
    counter("sluice_kv_transfer_failures_total", "transfers", "KV transfers that failed."),
    counter(
        TIER_TRANSFERS,
        "transfers",
        "KV transfers between engines by the network tier between their nodes: 0 one node, 1 one rack, 2 one pod, 3 "
        "beyond. `unknown` are those without configured tiers, and those that this replica decided itself.",
        *TIER,
    ),
    counter(TIER_BYTES, "bytes", "KV bytes that were moved between engines, by the same tiers.", *TIER),
    counter(
        PAIR_TRANSFERS,
        "transfers",
        f"KV transfers between engines by the nodes of both. At most {MOST_PAIRS} pairs have names at a replica, and "
        "the rest is `other`; the series of a pair ends when a node of it has no engine any more.",
        *PAIR,
    ),
    counter(PAIR_BYTES, "bytes", "KV bytes that were moved between engines, by the same pairs of nodes.", *PAIR),
    counter(
        "sluice_retries_total",
        "attempts",
        "Attempts that failed without output of their own and were followed by another, by the task that failed and by "
        "the reason.",
        "task", "reason",
    ),
    counter(
        "sluice_migrations_total",
        "choices",
        "Choices with output that went on at another engine, by the code of what befell their engine.",
        "code",
    ),
    seconds(
        "sluice_migration_stall_seconds",
        "Time from the last token of a choice before a migration to the first one after it, as its client sees it.",
    ),
    counter(
        "sluice_lease_renewals_total",
        "questions",
        "Questions to prefill engines for a longer lease on the KV of a request that waits for a decode engine.",
    ),
    counter(
        "sluice_prefix_loans_total",
        "loans",
        "Loans of a prefix from one engine to another, by how they ended: `used`, `recomputed` (the prefix was lent, "
        "and the prompt was computed without it), `failed` (the lender refused, went or took too long) or `dropped` "
        "(the attempt ended before its prompt was computed).",
        "result",
    ),
    counter(
        "sluice_fallback_decisions_total",
        "decisions",
        "Decisions that this replica made itself because no router decided, by task (prefill or decode).",
        "task",
    ),
    counter(
        "sluice_refused_events_total",
        "messages",
        "Messages that the stage of their request did not admit when they came; they changed nothing.",
    ),
    counter(
        "sluice_protocol_errors_total",
        "connections",
        "Connections of this replica that ended because a message could not be taken: its kind is unknown, its shape "
        "is wrong, or its handler failed.",
        "peer",
    ),
    counter(
        "sluice_silent_peers_total",
        "connections",
        "Connections that this replica ended because nothing came from the peer, or it read nothing, for some seconds: "
        "its process is stopped or hangs, or its host or the network is away.",
        "peer",
    ),
    counter(
        "sluice_listener_refusals_total",
        "requests",
        "Requests and connections that the listener refused or dropped, by reason: `connections` (too many "
        "connections), `address` (too many from one address), `memory` (the connections hold too many bytes of "
        "requests), `late` (a request took too long to arrive), `handshake` (a TLS handshake took too long), `host` (a "
        "name by which the server does not answer) or "
        "`unread` (clients leave too many bytes of answers unread, and this one most).",
        "reason",
    ),
    counter(
        "sluice_slow_clients_total",
        "streams",
        "Streams that were cut because their client left more than `slow_client_bytes` unread.",
    ),
    counter(
        "sluice_idle_answers_total",
        "answers",
        "Answers that had begun and ended with an error because no further token came for `idle_limit_s`.",
    ),
    counter(
        "sluice_killers_refused_total",
        "requests",
        "Requests that no engine got, because engines had died when they got the same request before.",
    ),
    counter(
        "sluice_internal_errors_total",
        "errors",
        "Faults of the ingress itself that were logged and survived; each one is a bug.",
    ),
    counter(
        "sluice_traces_total",
        "requests",
        "Requests whose traces were kept, by result: `exported`, `failed` (the collector did not take them) or "
        "`dropped` (too many waited).",
        "result",
    ),
    counter(
        "sluice_tenant_requests_total",
        "requests",
        "Requests with an API key that were admitted and have ended, by tenant and status; code 499 is a client that "
        "left. At most `tenant_labels` tenants have a name here, and the rest is `other`; `admin` are requests with an "
        "admin key.",
        "tenant", "code",
    ),
    counter(
        "sluice_tenant_tokens_total",
        "tokens",
        "Tokens that counted against the limits of API keys, by tenant and kind: `prompt`, `completion`, and of the "
        "prompts those from a prefix cache (`cached`).",
        "tenant", "kind",
    ),
    counter(
        "sluice_tenant_limited_total",
        "requests",
        "Requests that were refused because of a limit of their API key, by tenant and limit: `requests`, `tokens` or "
        "`parallel`.",
        "tenant", "limit",
    ),
    counter(
        "sluice_key_file_loads_total",
        "readings",
        "Readings of the key file, by result: `ok`, or `failed` (the keys before it hold).",
        "result",
    ),
    counter(
        "sluice_quota_store_errors_total",
        "calls",
        "Calls to the Redis of the quotas that failed; this replica then enforces its share of the limits.",
    ),
    counter(
        "sluice_usage_lines_total",
        "lines",
        "Lines of the usage log, by result: `written`, or `dropped` (the disk is slow, full or broken).",
        "result",
    ),
    counter(
        "sluice_audit_lines_total",
        "lines",
        "Lines of the audit log, by result: `written`, or `dropped` (the disk is slow, full or broken).",
        "result",
    ),
)  # fmt: skip
"""Every metric that `IngressMetrics` holds."""

_BY_NAME = {metric.name: metric for metric in INGRESS}

Series = list[tuple[tuple[str, ...], tuple[float, ...]]]
"""The series of one metric, as `actors.wire.messages.Figures` carries them."""


class IngressMetrics:
    """The registry of one ingress replica, and one attribute for each entry of `INGRESS`."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._held: list[tuple[Metric, Callable[[], Series]]] = []
        self._in_flight_now: Callable[[], float] = lambda: 0.0
        self._nodes: Callable[[], Set[str]] | None = None
        self._model = model
        self._requests = self._counter("sluice_requests_total")
        self._in_flight = self._gauge("sluice_in_flight")
        self.ttft = self._histogram("sluice_ttft_seconds")
        self.tpot = self._histogram("sluice_tpot_seconds")
        self.e2e = self._histogram("sluice_e2e_seconds")
        self.slo_requests = self._counter("sluice_slo_requests_total")
        self.queue = self._histogram("sluice_queue_seconds")
        self.prefill = self._histogram("sluice_prefill_seconds")
        self.pool_wait = self._histogram("sluice_pool_wait_seconds")
        self.transfer = self._histogram("sluice_transfer_seconds")
        self.decode = self._histogram("sluice_decode_seconds")
        self.prompt_tokens = self._counter("sluice_prompt_tokens_total")
        self.generation_tokens = self._counter("sluice_generation_tokens_total")
        self.kv_transfers = self._counter("sluice_kv_transfers_total")
        self.kv_bytes = self._counter("sluice_kv_transfer_bytes_total")
        self.kv_seconds = self._counter("sluice_kv_transfer_seconds_total")
        self.kv_descriptors = self._counter("sluice_kv_transfer_descriptors_total")
        self.transfer_failures = self._counter("sluice_kv_transfer_failures_total")
        self._moved = MovedCounts(
            self._counter(TIER_TRANSFERS),
            self._counter(TIER_BYTES),
            self._counter(PAIR_TRANSFERS),
            self._counter(PAIR_BYTES),
        )
        self.retries = self._counter("sluice_retries_total")
        self.migrations = self._counter("sluice_migrations_total")
        self.migration_stall = self._histogram("sluice_migration_stall_seconds")
        self.lease_renewals = self._counter("sluice_lease_renewals_total")
        self.prefix_loans = self._counter("sluice_prefix_loans_total")
        self.fallbacks = self._counter("sluice_fallback_decisions_total")
        self.refused_events = self._counter("sluice_refused_events_total")
        self.protocol_errors = self._counter("sluice_protocol_errors_total")
        self.silent_peers = self._counter("sluice_silent_peers_total")
        self._listener_refusals = self._counter("sluice_listener_refusals_total")
        self.slow_clients = self._counter("sluice_slow_clients_total")
        self.idle_answers = self._counter("sluice_idle_answers_total")
        self.killers_refused = self._counter("sluice_killers_refused_total")
        self.internal_errors = self._counter("sluice_internal_errors_total")
        self.traces = self._counter("sluice_traces_total")
        self._tenant_requests = self._counter("sluice_tenant_requests_total")
        self._tenant_tokens = self._counter("sluice_tenant_tokens_total")
        self.tenant_limited = self._counter("sluice_tenant_limited_total")
        self.key_file_loads = self._counter("sluice_key_file_loads_total")
        self.quota_store_errors = self._counter("sluice_quota_store_errors_total")
        self.usage_lines = self._counter("sluice_usage_lines_total")
        self.audit_lines = self._counter("sluice_audit_lines_total")

    def bind(self, in_flight: Callable[[], float]) -> None:
        """Sets the source of `sluice_in_flight`; called once, when the application is put together."""
        self._in_flight.set_function(in_flight)
        self._in_flight_now = in_flight

    def bind_nodes(self, nodes: Callable[[], Set[str]]) -> None:
        """Sets the source of the nodes that have engines; the series of others end."""
        self._nodes = nodes

    def render(self) -> bytes:
        """Returns the exposition text, with the figures of every collector in the registry."""
        self._forget_gone()
        return generate_latest(self.registry)

    def figures(self) -> list[Figures]:
        """Returns all that this replica counts itself, for an observer, which adds it up over the replicas."""
        self._forget_gone()
        return [
            Figures(metric.name, metric.kind, metric.help, metric.labels, metric.buckets, series())
            for metric, series in self._held
        ]

    def answered(self, code: int, request_class: str) -> None:
        """Counts one answered HTTP request; call exactly once per request."""
        self._requests.labels(str(code), request_class, self._model).inc()

    def tenant_used(self, tenant: str, code: int, prompt: int, cached: int, completion: int) -> None:
        """Counts an admitted request that has ended, and its tokens, for the label `tenant`."""
        self._tenant_requests.labels(tenant, str(code)).inc()
        for kind, tokens in (("prompt", prompt), ("cached", cached), ("completion", completion)):
            if tokens:
                self._tenant_tokens.labels(tenant, kind).inc(tokens)

    def listener_refused(self, reason: str) -> None:
        """Counts a request that was refused or dropped before it was complete."""
        self._listener_refusals.labels(reason).inc()

    def transferred(
        self, admission: Admitted, tier: int | None, source: str | None, target: str | None
    ) -> None:
        """Counts the KV transfer of a request that was just admitted, from the node `source` to the node `target` over
        a `tier` of the network; each is None where it is not known.
        """
        self._moved.add(tier, source, target, admission.transfer_bytes)
        self.kv_transfers.inc()
        self.kv_bytes.inc(admission.transfer_bytes)
        self.kv_seconds.inc(admission.transfer_s)
        self.kv_descriptors.inc(admission.descriptors)
        self.transfer.observe(admission.transfer_s)

    def closed(self, life: Life, prompt_tokens: int, outcome: Outcome) -> None:
        """Counts an attempt's output tokens, and observes the durations of its stages if it finished.

        Durations of other attempts were cut short and are not comparable.
        """
        self.generation_tokens.inc(life.attempt_tokens)
        if outcome != "finished":
            return
        times, prefilled = life.times, life.prefilled
        self.prompt_tokens.inc(prompt_tokens)
        if times.routed_s is not None:
            waited_s = 0.0 if prefilled is None else prefilled.queue_s
            self.queue.observe(times.routed_s - times.submitted_s + waited_s)
        if prefilled is not None:
            self.prefill.observe(prefilled.compute_s)
        if times.pooled_s is not None and times.decode_routed_s is not None:
            self.pool_wait.observe(times.decode_routed_s - times.pooled_s)
        if times.first_s is not None and times.last_s is not None:
            decode_s = times.last_s - times.first_s
            self.decode.observe(decode_s)

    def ended(self, end: RequestEnd, result: Result | None) -> None:
        """Counts the end of a whole request, and what became of its objectives (`RequestEnd.result`); call exactly once
        per prompt.
        """
        if end.outcome == "finished" and end.tpot_s is not None:
            self.tpot.observe(end.tpot_s, end.request_class)
        if result is not None:
            self.slo_requests.labels(end.request_class, result).inc()

    def _forget_gone(self) -> None:
        if self._nodes is not None:
            self._moved.forget_others(self._nodes())

    def _counter(self, name: str) -> LoopCounter:
        metric = _BY_NAME[name]
        made = LoopCounter(name, metric.help, metric.labels, self.registry)
        self._held.append((metric, made.series))
        return made

    def _gauge(self, name: str) -> Gauge:
        metric = _BY_NAME[name]
        made = Gauge(name, metric.help, metric.labels, registry=self.registry)
        self._held.append((metric, lambda: [((), (self._in_flight_now(),))]))
        return made

    def _histogram(self, name: str) -> LoopHistogram:
        metric = _BY_NAME[name]
        made = LoopHistogram(name, metric.help, metric.labels, metric.buckets, self.registry)
        self._held.append((metric, made.series))
        return made


def counting(counted: LoopCounter) -> Callable[[str, int], None]:
    """Returns a function that adds a number to the series of `counted` with one label's value, from any thread."""
    loop = asyncio.get_running_loop()

    def count(label: str, number: int) -> None:
        # at the end of the process the loop may be closed, and nobody reads the metrics any more
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(counted.labels(label).inc, number)

    return count
