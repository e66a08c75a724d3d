"""The real engine: vLLM's AsyncLLM runs in this process, and its core and workers run in child processes.

This module starts, watches and ends these processes; `runner` handles the requests. Modules that import vLLM are
imported only after `launch` has prepared this process.

Every engine can prefill for others and decode from others. Its role matters only to routing.
"""

import asyncio
import dataclasses
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from actors.engine.leases import AttemptLeases
from actors.engine.protocol import EngineMetrics, Sink
from actors.engine.vllm.config import VllmEngineConfig, resolve_stall_s
from actors.engine.vllm.connector.acquaintance import unpacked
from actors.engine.vllm.core_watch import CoreWatch
from actors.engine.vllm.kv_events import KvEventFeed
from actors.engine.vllm.launch import (
    PhaseClock,
    core_phases,
    describe,
    exchange_of,
    launch,
    remove_kv_sockets,
    warm_up,
)
from actors.engine.vllm.start_limit import within
from actors.engine.vllm.stats import CoreCounts, Ledger, Transfer
from actors.engine.watchdog import StallLimits
from actors.engine.weights.exchange import WeightsExchange
from actors.wire.messages import (
    Decode,
    EngineInfo,
    EngineState,
    Failed,
    KVRenewed,
    Prefill,
    Role,
    Status,
    WeightsRead,
)
from policies.engine_model.blocks import Change
from policies.request.stage import Task

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from actors.engine.vllm.runner import TaskRunner
    from actors.engine.vllm.task import EngineTask, Stream

log = logging.getLogger(__name__)

SHUTDOWN_S = 10.0
"""Seconds that vLLM gets to end its processes by itself."""


class VllmEngine:
    """Implements `actors.engine.protocol.Engine` with vLLM. All methods belong to one event loop."""

    def __init__(self, config: VllmEngineConfig) -> None:
        self._config = config
        self._clock = PhaseClock()
        self._llm: AsyncLLM | None = None
        self._runner: TaskRunner | None = None
        self._sink: Sink
        self._info: EngineInfo
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="vllm-start")
        self._leases = AttemptLeases()
        self._ledger = Ledger(
            self._on_transfer,
            self._on_lease_ended,
            self._on_step,
            self._on_overdue,
            self._on_renewed,
            self._on_reading,
        )
        self._watch: CoreWatch | None = None
        self._kv_feeds: list[KvEventFeed] = []
        self._draining = False
        self._meeting: set[asyncio.Task[None]] = set()
        self._rank_blocks = 0
        self._weights: WeightsExchange | None = None

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the start (see `launch`); `ready` is their sum."""
        return self._clock.phases

    @property
    def loading_s(self) -> tuple[float, float]:
        """Seconds for which the last start loaded weights, and seconds from then on until the engine was ready."""
        phases = self.phases
        after = sum(phases.get(name, 0.0) for name in ("kv_cache", "core_ready", "warm_up"))
        return phases.get("weights", 0.0), after

    @property
    def weights(self) -> WeightsRead | None:
        """Where the weights of the last start came from; None where they can only be on disk."""
        return None if self._weights is None else self._weights.read

    # ------------------------------------------------------------------------------------------ life cycle

    async def start(self, sink: Sink) -> None:
        """Starts the engine's processes, loads the model and warms up, which takes about a minute. Raises vLLM's
        error, or StartTimeoutError after `start_limit_s`.
        """
        self._sink = sink
        self._clock = PhaseClock()
        await within(self._config.start_limit_s, self._start())

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._weights = exchange_of(self._config)
        llm = await loop.run_in_executor(
            self._starter, launch, self._config, self._ledger, self._clock, self._weights
        )
        self._llm = llm
        if self._weights is not None:
            self._weights.loaded()
        if llm.vllm_config.kv_events_config is not None:
            for _, source in sorted(llm.get_kv_event_sources().items()):  # by data-parallel rank
                feed = KvEventFeed(source.endpoint, source.replay_endpoint)
                feed.start()
                self._kv_feeds.append(feed)
        from actors.engine.vllm.runner import TaskRunner
        from actors.engine.vllm.tools import ToolParsing

        supported = await llm.get_supported_tasks()
        tools = ToolParsing.build(self._config, llm)
        answers_at_s = time.time()
        await warm_up(llm)
        hellos, ranks = self._ledger.hellos, self._config.data_parallel_size
        core_phases(self._clock, hellos)
        self._clock.end("core_ready", answers_at_s)
        self._clock.end("warm_up")
        self._clock.phases["ready"] = round(time.time() - self._clock.started_at_s, 3)
        self._info = describe(self._config, llm, hellos)
        if self._weights is not None:
            self._info = msgspec.structs.replace(self._info, weights=self._weights.addresses)
        self._rank_blocks = self._info.kv_blocks // ranks
        block_bytes = sum(hello.kv_block_bytes for hello in hellos) // ranks
        self._runner = TaskRunner(self._config, llm, self._sink, tools, supported, self._leases, block_bytes)
        limits = StallLimits(resolve_stall_s(self._config), self._config.replace_after_stalls)
        self._watch = CoreWatch(llm, limits)
        self._watch.start()
        log.info("vLLM engine %s is ready: %s", self._config.engine_id, self.phases)

    def info(self) -> EngineInfo:
        """Returns the facts about this engine, of which only the role changes while it runs."""
        return self._info

    def set_role(self, role: Role) -> None:
        """Serves `role` from now on. In vLLM a role is a matter of routing: an engine computes what it is sent."""
        self._info = msgspec.structs.replace(self._info, role=role)

    def meet(self, peers: tuple[bytes, ...]) -> None:
        """Makes NIXL's handshakes with engines from which this one may come to read KV, in the background."""
        task = asyncio.get_running_loop().create_task(self._meet(peers), name="handshakes")
        self._meeting.add(task)
        task.add_done_callback(self._meeting.discard)

    async def _meet(self, peers: tuple[bytes, ...]) -> None:
        if self._llm is None:
            return
        try:
            known = [msgspec.structs.asdict(unpacked(peer)) for peer in peers]
            await self._llm.collective_rpc("meet_kv_peers", args=(known,))
        except Exception as error:
            # vLLM raises errors of many kinds; without a handshake the first read makes it
            log.warning("engine %s has not met its peers: %r", self._config.engine_id, error)

    @property
    def state(self) -> EngineState:
        """The engine's state as its watch knows it: "down" once a core has died, "stalled" while one stands still."""
        return "ready" if self._watch is None else self._watch.state

    @property
    def silent_s(self) -> float:
        """Seconds for which the most silent core has stood still."""
        return 0.0 if self._watch is None else self._watch.silent_s

    async def check_health(self) -> None:
        """Raises vLLM's EngineDeadError if its core has died, or RuntimeError if a core is lost or this engine does not
        run.
        """
        if self._llm is None:
            raise RuntimeError(f"vLLM engine {self._config.engine_id} does not run")
        if self._watch is not None:
            self._watch.check()
        await self._llm.check_health()

    def kv_events(self, rank: int = 0) -> list[Change]:
        """Returns the changes of the prefix cache of `rank` since the last call."""
        return self._kv_feeds[rank].translator.drain() if self._kv_feeds else []

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new work and waits until all tasks and leases have ended. Returns False if they have not after
        `timeout_s`.
        """
        self._draining = True
        if self._runner is not None:
            self._runner.draining = True
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while (self._runner is not None and self._runner.busy) or len(self._leases):
            if loop.time() >= until_s:
                return False
            await asyncio.sleep(0.02)
        return True

    async def stop(self) -> None:
        """Fails all tasks and ends the processes. Idempotent."""
        self._draining = True
        llm, self._llm = self._llm, None
        if self._runner is not None:
            self._runner.stop()
            self._runner = None
        self._leases.clear()
        for feed in self._kv_feeds:
            await feed.stop()
        self._kv_feeds.clear()
        if self._watch is not None:
            self._watch.stop()
            if self._watch.state != "ready":
                # A core that stands still takes no request to end.
                self._watch.kill()
        if llm is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._starter, lambda: llm.shutdown(timeout=SHUTDOWN_S))
            if llm.vllm_config.kv_events_config is not None:
                remove_kv_sockets(llm.vllm_config.kv_events_config)
        if self._weights is not None:
            await asyncio.get_running_loop().run_in_executor(self._starter, self._weights.stop)
        self._starter.shutdown(wait=False)

    # -------------------------------------------------------------------------------------------- requests

    def prefill(self, msg: Prefill) -> None:
        """Computes the prompt and keeps its KV under a lease (`TaskRunner.prefill`)."""
        if self._runner is None:
            self._refuse(msg.attempt_id, "prefill")
        else:
            self._runner.prefill(msg)

    def decode(self, msg: Decode) -> None:
        """Generates the output (`TaskRunner.decode`)."""
        if self._runner is None:
            self._refuse(msg.attempt_id, "decode")
        else:
            self._runner.decode(msg)

    def cancel(self, attempt_id: str) -> None:
        """Ends the tasks of `attempt_id` in any stage, and its leases."""
        if self._runner is not None:
            self._runner.cancel(attempt_id)

    def release(self, attempt_id: str) -> None:
        """Ends the leases of `attempt_id`."""
        if self._runner is not None:
            self._runner.release(attempt_id)

    def renew(self, attempt_id: str, lease_s: float) -> None:
        """Makes the lease of `attempt_id` last for `lease_s` from now on; the answer comes with a core's report."""
        if self._runner is None:
            self._sink.renewed(KVRenewed(attempt_id, 0.0))
        else:
            self._runner.renewals.ask(attempt_id, lease_s)

    def lease_rank(self, attempt_id: str) -> int:
        """Returns the rank that holds the KV of a finished prefill; 0 if none does."""
        held = self._leases.of(attempt_id)
        return held[-1][1] if held else 0

    def _refuse(self, attempt_id: str, kind: Task) -> None:
        message = f"engine {self._config.engine_id} does not run"
        self._sink.failed(Failed(attempt_id, kind, "draining", message, True))

    def _on_transfer(self, transfer: Transfer) -> None:
        if self._runner is not None:
            self._runner.on_transfer(transfer)

    def _on_lease_ended(self, request_id: str) -> None:
        self._leases.ended(request_id)
        if self._runner is not None:
            self._runner.renewals.ended(request_id)

    def _on_renewed(self, request_id: str) -> None:
        if self._runner is not None:
            self._runner.renewals.renewed(request_id)

    def _on_reading(self, request_id: str) -> None:
        if self._runner is not None:
            self._runner.on_reading(request_id)

    def _on_overdue(self, request_id: str) -> None:
        if self._runner is not None:
            self._runner.on_overdue(request_id)

    def _on_step(self, core: int) -> None:
        if self._watch is not None:
            self._watch.step(core)

    # ------------------------------------------------------------------------------------------------ counts

    def status(self) -> Status:
        """Returns the present counts of all ranks together, and of each rank if there are several."""
        running, waiting = self._ledger.requests()
        # The core reports after its steps, which may take seconds. Requests that it has not seen count as waiting.
        waiting = max(waiting, len(self._streams()) - running)
        used = self._ledger.used_blocks(self._rank_blocks)
        ranks = range(self._info.dp_ranks) if self._info.dp_ranks > 1 else ()
        return Status(
            engine_id=self._config.engine_id,
            running=running,
            waiting=waiting,
            kv_blocks_used=used,
            leases=len(self._leases),
            kv_usage=used / max(1, self._info.kv_blocks),
            state="draining" if self._draining and self.state == "ready" else self.state,
            tokens_in_flight=sum(task.kv_tokens for task in self._decodes()),
            ranks=[self._rank_status(rank) for rank in ranks],
        )

    def _rank_status(self, rank: int) -> Status:
        """Returns the present counts of one data-parallel rank. Requests that vLLM placed itself are only in its core's
        counts.
        """
        core = self._ledger.cores.get(rank, CoreCounts())
        sent = sum(stream.task.msg.dp_rank == rank for stream in self._streams())
        decodes = [task for task in self._decodes() if task.msg.dp_rank == rank]
        return Status(
            engine_id=self._config.engine_id,
            running=core.running,
            waiting=max(core.waiting, sent - core.running),
            kv_blocks_used=round(core.kv_usage * self._rank_blocks),
            leases=self._leases.on_rank(rank),
            kv_usage=core.kv_usage,
            tokens_in_flight=sum(task.kv_tokens for task in decodes),
        )

    def _streams(self) -> "list[Stream]":
        return [] if self._runner is None else list(self._runner.streams.values())

    def _decodes(self) -> "list[EngineTask]":
        return [] if self._runner is None else self._runner.decodes

    def metrics(self) -> EngineMetrics:
        """Returns the totals since the start of the engine."""
        self._ledger.totals.stalls = 0 if self._watch is None else self._watch.stalls
        self._ledger.totals.kv_feed_errors = sum(feed.errors for feed in self._kv_feeds)
        info = self._info
        used = self._ledger.used_blocks(self._rank_blocks)
        found = self._ledger.metrics(info.kv_blocks, used, info.block_size_tokens)
        if self._weights is None:
            return found
        return dataclasses.replace(found, weights_lent_bytes=self._weights.lent_bytes)
