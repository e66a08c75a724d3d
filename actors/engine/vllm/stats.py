"""Reports that the engine core sends with its steps, kept for `status()` and `metrics()`.

vLLM calls a stat logger after every step that had something to report. Counts of requests and KV blocks are the
engine's own (leased blocks included, merely cached ones are free, vLLM's null block is not counted); the connector's
reports per request are handed on at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.engine.protocol import EngineMetrics
from actors.engine.vllm.connector import ENDED, HELLO, TRANSFERS


@dataclass(frozen=True, slots=True)
class Transfer:
    """The pull of one request's KV by one worker, as the worker saw it."""

    request_id: str
    ok: bool
    bytes: int
    seconds: float
    descriptors: int
    held_s: float


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first report: NIXL's compatibility hash, bytes of its part of a KV block, Unix times of its start."""

    compatibility_hash: str
    kv_block_bytes: int
    born_at_s: float
    imported_at_s: float
    loaded_at_s: float


@dataclass
class CoreCounts:
    """Last report of one engine core (one per data-parallel rank)."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


@dataclass
class Totals:
    """Monotonic since start."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    transfer_descriptors: int = 0
    transfer_failures: int = 0
    leases_expired: int = 0


@dataclass
class Ledger:
    """Everything the cores have reported. Callbacks run on the engine's event loop, inside the step's processing."""

    on_transfer: Callable[[Transfer], None]
    on_lease_ended: Callable[[str], None]
    cores: dict[int, CoreCounts] = field(default_factory=dict)
    hellos: list[Hello] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    def scheduler(self, core: int, stats: Any) -> None:
        """One step's SchedulerStats of core `core`."""
        self.cores[core] = CoreCounts(
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            kv_usage=stats.kv_cache_usage,
        )
        if stats.kv_connector_stats:
            self.connector(stats.kv_connector_stats)

    def iteration(self, stats: Any) -> None:
        """One step's IterationStats: tokens prefilled by this engine itself, tokens generated, preemptions."""
        self.totals.prefill_tokens += stats.prompt_token_stats.computed
        self.totals.decode_tokens += stats.num_generation_tokens
        self.totals.preemptions += stats.num_preempted_reqs

    def connector(self, data: dict[str, Any]) -> None:
        """One step's connector stats: NIXL's lists of numbers and ours of requests."""
        totals = self.totals
        totals.leases_expired += len(data.get("num_kv_expired_reqs", ()))
        for entry in data.get(HELLO, ()):
            self.hellos.append(Hello(*entry))
        for entry in data.get(TRANSFERS, ()):
            transfer = Transfer(*entry)
            if transfer.ok:
                totals.transfers += 1
                totals.transfer_bytes += transfer.bytes
                totals.transfer_s += transfer.seconds
                totals.transfer_descriptors += transfer.descriptors
            else:
                totals.transfer_failures += 1
            self.on_transfer(transfer)
        for request_id in data.get(ENDED, ()):
            self.on_lease_ended(request_id)

    def requests(self) -> tuple[int, int]:
        """Running and waiting requests as all cores last counted them."""
        cores = self.cores.values()
        return sum(core.running for core in cores), sum(core.waiting for core in cores)

    def used_blocks(self, blocks_per_core: int) -> int:
        """KV blocks in use, all cores together; `blocks_per_core` without the null block."""
        return sum(round(core.kv_usage * blocks_per_core) for core in self.cores.values())

    def metrics(self, blocks: int, used: int) -> EngineMetrics:
        """The totals, with `blocks` KV blocks of which `used` are in use."""
        totals = self.totals
        return EngineMetrics(
            prefill_tokens=totals.prefill_tokens,
            decode_tokens=totals.decode_tokens,
            transfers=totals.transfers,
            transfer_bytes=totals.transfer_bytes,
            transfer_s=totals.transfer_s,
            transfer_descriptors=totals.transfer_descriptors,
            transfer_failures=totals.transfer_failures,
            leases_expired=totals.leases_expired,
            kv_blocks_total=blocks,
            kv_blocks_used=used,
            kv_blocks_free=blocks - used,
            preemptions=totals.preemptions,
        )


def stat_logger(ledger: Ledger) -> Any:
    """A factory of vLLM stat loggers that write into `ledger`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class LedgerLogger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._core = engine_index

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if iteration_stats is not None:
                ledger.iteration(iteration_stats)
            if scheduler_stats is not None:
                ledger.scheduler(self._core, scheduler_stats)

        def log_engine_initialized(self) -> None:
            pass

    return LedgerLogger
