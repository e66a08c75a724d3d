"""The reports that vLLM's engine cores send with their steps, kept for `status()` and `metrics()`.

vLLM calls a stat logger after every step that had something to report. The counts of requests and KV blocks are the
core's own. They count leased blocks as used and merely cached ones as free, and leave out vLLM's null block. The
connector's reports about single requests are passed on at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.engine.protocol import EngineMetrics
from actors.engine.vllm.connector import ENDED, HELLO, LISTENER, OVERDUE, READING, RENEWED, TRANSFERS


@dataclass(frozen=True, slots=True)
class Transfer:
    """The pull of one request's KV by one worker, as the worker measured it: `seconds` in which something was in
    flight, `held_s` in which nothing was, whether checksums differed, and why a part was read without a flow
    scheduler's permit (empty: it was not, or there is no scheduler), and the priority `level` of its permits.
    """

    request_id: str
    ok: bool
    bytes: int
    seconds: float
    descriptors: int
    held_s: float
    corrupt: bool = False
    unscheduled: str = ""
    level: int | None = None


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first report: NIXL's compatibility hash, the bytes of its part of a KV block, and Unix times of its
    start.
    """

    compatibility_hash: str
    kv_block_bytes: int
    born_at_s: float
    imported_at_s: float
    loaded_at_s: float
    registered_at_s: float


@dataclass
class CoreCounts:
    """The last counts that one engine core reported. There is one core per data-parallel rank."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    busy: bool = False
    """Whether the next step followed at once."""
    step_at_s: float | None = None
    """When the core's last step ended, if it had more to do then; the next step takes from then on."""


@dataclass
class Totals:
    """Monotonic totals since the start."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    transfer_descriptors: int = 0
    transfer_failures: int = 0
    transfer_mismatches: int = 0
    transfers_unscheduled: int = 0
    leases_expired: int = 0
    stalls: int = 0
    transfers_overdue: int = 0
    handshakes_refused: int = 0
    handshake_restarts: int = 0
    kv_feed_errors: int = 0
    step_s: float = 0.0
    prefill_steps: int = 0
    prefill_step_tokens: int = 0
    decode_steps: int = 0
    decode_step_seqs: int = 0
    decode_step_usage: float = 0.0
    """Shares of one core's KV in use, added up over the steps that decoded."""


@dataclass
class Ledger:
    """All reports of the cores. Callbacks run on the engine's event loop, while a step is processed."""

    on_transfer: Callable[[Transfer], None]
    on_lease_ended: Callable[[str], None]
    on_step: Callable[[int], None] = lambda core: None
    on_overdue: Callable[[str], None] = lambda request_id: None
    on_lease_renewed: Callable[[str], None] = lambda request_id: None
    on_reading: Callable[[str], None] = lambda request_id: None
    cores: dict[int, CoreCounts] = field(default_factory=dict)
    hellos: list[Hello] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    def scheduler(self, core: int, stats: Any) -> None:
        """Takes the SchedulerStats of one step of core `core`."""
        last = self.cores.get(core)
        self.cores[core] = CoreCounts(
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            kv_usage=stats.kv_cache_usage,
            busy=stats.num_running_reqs + stats.num_waiting_reqs > 0,
            # a core that stood idle since its last report took none of that time for its next step
            step_at_s=last.step_at_s if last is not None and last.busy else None,
        )
        self.on_step(core)
        if stats.kv_connector_stats:
            self.connector(stats.kv_connector_stats)

    def step(self, core: int, stats: Any) -> None:
        """Takes the IterationStats of a step of core `core` for the sums over steps, after its SchedulerStats.

        vLLM does not tell how long a step took. A step that follows one which left something to do took the time
        between both reports. Of the others only those count that computed whole prompts of requests for one token,
        which are all that a prefill engine does under a low load: vLLM times them. Not claimed: what the reports' own
        way adds, and the KV of leases, which counts as KV of the sequences.
        """
        counts, totals = self.cores.get(core), self.totals
        if counts is None:
            return
        at_s, before_s = stats.iteration_timestamp, counts.step_at_s
        counts.step_at_s = at_s if counts.busy else None
        computed = stats.prompt_token_stats.computed
        if before_s is not None:
            took_s = at_s - before_s
        else:
            prompts = [one.prefill_time for one in stats.finished_requests if one.num_generation_tokens == 1]
            took_s = max(prompts, default=0.0) if computed else 0.0
        if took_s <= 0.0:
            return
        totals.step_s += took_s
        totals.prefill_steps += computed > 0
        totals.prefill_step_tokens += computed
        # the first token of a request comes with its prompt
        decoded = stats.num_generation_tokens - len(stats.time_to_first_tokens_iter)
        if decoded > 0:
            totals.decode_steps += 1
            totals.decode_step_seqs += decoded
            totals.decode_step_usage += counts.kv_usage

    def iteration(self, stats: Any) -> None:
        """Takes the IterationStats of one step: tokens prefilled by this engine itself, tokens generated,
        preemptions.
        """
        self.totals.prefill_tokens += stats.prompt_token_stats.computed
        self.totals.decode_tokens += stats.num_generation_tokens
        self.totals.preemptions += stats.num_preempted_reqs

    def connector(self, data: dict[str, Any]) -> None:
        """Takes the connector's stats of one step: NIXL's lists of numbers, and Sluice's lists of requests."""
        totals = self.totals
        totals.leases_expired += len(data.get("num_kv_expired_reqs", ()))
        for entry in data.get(HELLO, ()):
            self.hellos.append(Hello(*entry))
        for request_id in data.get(READING, ()):
            self.on_reading(request_id)
        for entry in data.get(TRANSFERS, ()):
            transfer = Transfer(*entry)
            if transfer.ok:
                totals.transfers += 1
                totals.transfer_bytes += transfer.bytes
                totals.transfer_s += transfer.seconds
                totals.transfer_descriptors += transfer.descriptors
            else:
                totals.transfer_failures += 1
            totals.transfer_mismatches += transfer.corrupt
            totals.transfers_unscheduled += bool(transfer.unscheduled)
            self.on_transfer(transfer)
        for request_id in data.get(ENDED, ()):
            self.on_lease_ended(request_id)
        for request_id in data.get(RENEWED, ()):
            self.on_lease_renewed(request_id)
        for request_id in data.get(OVERDUE, ()):
            totals.transfers_overdue += 1
            self.on_overdue(request_id)
        for refused, reopened in data.get(LISTENER, ()):
            totals.handshakes_refused += refused
            totals.handshake_restarts += reopened

    def requests(self) -> tuple[int, int]:
        """Returns the numbers of running and of waiting requests, as all cores last reported them."""
        cores = self.cores.values()
        return sum(core.running for core in cores), sum(core.waiting for core in cores)

    def used_blocks(self, blocks_per_core: int) -> int:
        """Returns the number of KV blocks in use by all cores. `blocks_per_core` is given without the null block."""
        return sum(round(core.kv_usage * blocks_per_core) for core in self.cores.values())

    def metrics(self, blocks: int, used: int, block_tokens: int) -> EngineMetrics:
        """Returns the totals, for an engine with `blocks` KV blocks of `block_tokens` tokens, of which `used` are in
        use.
        """
        totals = self.totals
        core_tokens = blocks // max(1, len(self.cores)) * block_tokens
        return EngineMetrics(
            prefill_tokens=totals.prefill_tokens,
            decode_tokens=totals.decode_tokens,
            transfers=totals.transfers,
            transfer_bytes=totals.transfer_bytes,
            transfer_s=totals.transfer_s,
            transfer_descriptors=totals.transfer_descriptors,
            transfer_failures=totals.transfer_failures,
            transfer_mismatches=totals.transfer_mismatches,
            transfers_unscheduled=totals.transfers_unscheduled,
            leases_expired=totals.leases_expired,
            kv_blocks_total=blocks,
            kv_blocks_used=used,
            kv_blocks_free=blocks - used,
            preemptions=totals.preemptions,
            stalls=totals.stalls,
            transfers_overdue=totals.transfers_overdue,
            handshakes_refused=totals.handshakes_refused,
            handshake_restarts=totals.handshake_restarts,
            kv_feed_errors=totals.kv_feed_errors,
            step_s=totals.step_s,
            prefill_steps=totals.prefill_steps,
            prefill_step_tokens=totals.prefill_step_tokens,
            decode_steps=totals.decode_steps,
            decode_step_seqs=totals.decode_step_seqs,
            decode_step_kv_tokens=round(totals.decode_step_usage * core_tokens),
        )


def stat_logger(ledger: Ledger) -> Any:
    """Returns a factory of vLLM stat loggers that write into `ledger`."""
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
                if iteration_stats is not None:
                    ledger.step(self._core, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return LedgerLogger
