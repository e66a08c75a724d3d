"""The real engine: vLLM's AsyncLLM in this process, its core and workers in child processes.

Requests go to vLLM's core as token ids and come back as outputs of whole engine steps. vLLM would wake one task
per request and step; here its output processor writes into `Stream`s that collect a step's output, so one engine
step is one `sink.tokens` call. Adds, aborts and releases leave through one queue, hence in the order in which
they were asked for.

Every engine can prefill for others and decode from others, whatever its role: the role is a matter of routing.
"""

import asyncio
import gc
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from actors.engine.protocol import EngineMetrics, Sink
from actors.engine.vllm.config import VllmEngineConfig
from actors.engine.vllm.connector.keys import RELEASE
from actors.engine.vllm.kv_events import KvEventFeed
from actors.engine.vllm.launch import PhaseClock, core_phases, describe, launch, remove_kv_sockets, warm_up
from actors.engine.vllm.leases import Leases
from actors.engine.vllm.outbox import Outbox
from actors.engine.vllm.stats import CoreCounts, Ledger, Transfer
from actors.wire.messages import Admitted, Decode, EngineInfo, Failed, Out, Prefill, Status
from policies.engine_model.blocks import Change

log = logging.getLogger(__name__)

Stage = Literal["prefill", "decode"]

_SHUTDOWN_S = 10.0


class VllmEngine:
    """`actors.engine.protocol.Engine` over vLLM. All methods belong to one event loop."""

    def __init__(self, config: VllmEngineConfig) -> None:
        self._config = config
        self._clock = PhaseClock()
        self._llm: Any = None
        self._sink: Sink
        self._info: EngineInfo
        self._tools: Any = None
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="vllm-start")
        self._works: dict[tuple[str, str], Any] = {}
        self._streams: dict[str, Any] = {}  # vLLM's request id -> stream of an unfinished choice
        self._leases = Leases()
        self._ledger = Ledger(self._on_transfer, self._leases.ended)
        self._batch: list[Out] = []
        self._outbox = Outbox(self._on_unsent)
        self._kv_feeds: list[KvEventFeed] = []
        self._draining = False
        self._releases = 0
        self._blocks = 0
        self._block_bytes = 0
        self._defaults: dict[str, Any] = {}

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the start (see vllm_launch), and `ready`: all of them together."""
        return self._clock.phases

    # ------------------------------------------------------------------------------------------ life cycle

    async def start(self, sink: Sink) -> None:
        """Start the engine's processes, load the model, warm up. Takes a minute; raises vLLM's error when it cannot."""
        self._sink = sink
        self._clock = PhaseClock()
        loop = asyncio.get_running_loop()
        self._llm = await loop.run_in_executor(self._starter, launch, self._config, self._ledger, self._clock)
        # These import vLLM, which by now is loaded.
        from actors.engine.vllm import params as vllm_params
        from actors.engine.vllm import work as vllm_work
        from actors.engine.vllm.tools import ToolParsing

        self._params, self._work = vllm_params, vllm_work
        if self._llm.vllm_config.kv_events_config is not None:
            for _, source in sorted(self._llm.get_kv_event_sources().items()):  # by data-parallel rank
                feed = KvEventFeed(source.endpoint, source.replay_endpoint)
                feed.start()
                self._kv_feeds.append(feed)
        self._tasks = await self._llm.get_supported_tasks()
        self._defaults = self._llm.model_config.get_diff_sampling_param()
        self._tools = ToolParsing.build(self._config, self._llm)
        self._outbox.start()
        answers_at_s = time.time()
        await warm_up(self._llm)
        core_phases(self._clock, self._ledger.hellos)
        self._clock.end("core_ready", answers_at_s)
        self._clock.end("warm_up")
        self._clock.phases["ready"] = round(time.time() - self._clock.started_at_s, 3)
        self._info = describe(self._config, self._llm, self._ledger.hellos)
        self._blocks = self._info.kv_blocks // self._config.data_parallel_size
        self._block_bytes = (
            sum(h.kv_block_bytes for h in self._ledger.hellos) // self._config.data_parallel_size
        )
        gc.collect()
        gc.freeze()  # vLLM's modules never become garbage; scanning them would stall tokens
        log.info("vLLM engine %s is ready: %s", self._config.engine_id, self.phases)

    def info(self) -> EngineInfo:
        return self._info

    async def check_health(self) -> None:
        await self._llm.check_health()

    def kv_events(self, rank: int = 0) -> list[Change]:
        return self._kv_feeds[rank].translator.drain() if self._kv_feeds else []

    async def drain(self, timeout_s: float) -> bool:
        self._draining = True
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while self._works or len(self._leases):
            if loop.time() >= until_s:
                return False
            await asyncio.sleep(0.02)
        return True

    async def stop(self) -> None:
        llm = self._llm
        self._draining = True
        self._outbox.stop()
        for work in list(self._works.values()):
            self._fail(work, "engine_dead", f"engine {self._config.engine_id} was stopped", True)
        self._leases.clear()
        self._llm = None
        for feed in self._kv_feeds:
            await feed.stop()
        self._kv_feeds.clear()
        if llm is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._starter, lambda: llm.shutdown(timeout=_SHUTDOWN_S))
            remove_kv_sockets(self._config)
        self._starter.shutdown(wait=False)

    # -------------------------------------------------------------------------------------------- requests

    def prefill(self, msg: Prefill) -> None:
        if not self._accepts("prefill", msg.attempt_id):
            return
        work = self._work.Work("prefill", msg)
        try:
            request = self._request(msg, self._params.prefill_params())
        except self._params.BadParameter as e:
            self._sink.failed(Failed(msg.attempt_id, "prefill", "bad_request", str(e), False, e.param))
            return
        except Exception as e:
            self._unexpected(msg.attempt_id, "prefill", e)
            return
        self._begin(work)
        self._submit(work, 0, request)

    def decode(self, msg: Decode) -> None:
        if not self._accepts("decode", msg.attempt_id):
            return
        try:
            work = self._work.Work("decode", msg, choices=self._params.sequences(msg.params))
            requests = [self._request(msg, params) for params in self._choice_params(work)]
        except self._params.BadParameter as e:
            self._sink.failed(Failed(msg.attempt_id, "decode", "bad_request", str(e), False, e.param))
            return
        except self._work.BadHandle as e:
            self._sink.failed(Failed(msg.attempt_id, "decode", "unknown_handle", str(e), True))
            return
        except Exception as e:
            self._unexpected(msg.attempt_id, "decode", e)
            return
        self._begin(work)
        pulling = work.remote is not None
        for index, request in enumerate(requests):
            if index > 0 and pulling:
                work.siblings.append((index, request))
            else:
                self._submit(work, index, request)

    def _choice_params(self, work: Any) -> list[Any]:
        """SamplingParams of each choice; the first pulls the KV. Raises BadParameter, BadHandle."""
        msg = work.msg
        base = self._params.sampling_params(msg.params, self._defaults)
        if msg.chat is not None:
            session = self._tools.session(msg.chat, msg.tokens)
            session.adjust(base)
            work.parsers = [session.choice() for _ in range(work.choices)]
        children = [self._params.child_params(base, index) for index in range(work.choices)]
        if msg.handle is not None:
            remote = self._work.decode_handle(msg.handle)
            if base.prompt_logprobs is not None:
                # vLLM computes such a prompt itself; the copy that the prefill holds is given back unread.
                self._give_up(remote)
            else:
                work.remote = remote
                children[0].extra_args = {"kv_transfer_params": remote}
        return children

    def _request(self, msg: Prefill | Decode, params: Any) -> Any:
        """vLLM's request. Raises BadParameter where vLLM refuses the prompt or a parameter."""
        from vllm.inputs.engine import tokens_input

        try:
            request = self._llm.input_processor.process_inputs(
                msg.attempt_id, tokens_input(msg.tokens), params, supported_tasks=self._tasks, priority=msg.priority,
                data_parallel_rank=msg.dp_rank,
            )  # fmt: skip
        except self._params.REFUSALS as e:
            raise self._params.bad_parameter(e) from e
        self._llm.input_processor.assign_request_id(request)
        return request

    def _unexpected(self, attempt_id: str, stage: Stage, error: Exception) -> None:
        """vLLM failed over one request in a way that it does not name; the others go on."""
        log.error("vLLM could not take the %s of %s", stage, attempt_id, exc_info=error)
        message = f"vLLM could not take the request: {error!r}; see the engine's log"
        self._sink.failed(Failed(attempt_id, stage, "internal", message, False))

    def cancel(self, attempt_id: str) -> None:
        for stage in ("prefill", "decode"):
            work = self._works.get((stage, attempt_id))
            if work is not None:
                self._abort(work)
        self._release_leases(attempt_id)

    def release(self, attempt_id: str) -> None:
        work = self._works.get(("prefill", attempt_id))
        if work is not None:
            self._abort(work)
        self._release_leases(attempt_id)

    # ------------------------------------------------------------------------------------------ life of a work

    def _accepts(self, stage: Stage, attempt_id: str) -> bool:
        if self._draining or self._llm is None:
            self._sink.failed(
                Failed(
                    attempt_id, stage, "draining", f"engine {self._config.engine_id} is shutting down", True
                )
            )
            return False
        if (stage, attempt_id) in self._works:
            message = f"engine {self._config.engine_id} already runs a {stage} of {attempt_id}"
            self._sink.failed(Failed(attempt_id, stage, "internal", message, False))
            return False
        return True

    def _begin(self, work: Any) -> None:
        self._works[work.stage, work.attempt_id] = work
        delay_s = max(0.0, work.msg.timeout_s)
        work.timer = asyncio.get_running_loop().call_later(delay_s, self._on_deadline, work)

    def _end(self, work: Any) -> None:
        """The one way out of every work."""
        work.ended = True
        self._works.pop((work.stage, work.attempt_id), None)
        if work.timer is not None:
            work.timer.cancel()
        for stream in work.streams:
            self._streams.pop(stream.request_id, None)

    def _submit(self, work: Any, index: int, request: Any) -> None:
        stream = self._work.Stream(self._on_output, work, index, request.request_id)
        work.streams.append(stream)
        self._streams[request.request_id] = stream
        self._llm.output_processor.add_request(request, None, None, index, stream)
        core = self._llm.engine_core
        self._outbox.post(lambda: core.add_request_async(request), work)

    def _abort(self, work: Any) -> None:
        """End a work without a word to the client; the core frees its blocks and tells the lender of a pull."""
        ids = work.open_ids()
        self._end(work)
        self._batch = [piece for piece in self._batch if piece.attempt_id != work.attempt_id]
        self._llm.output_processor.abort_requests(ids, internal=True)
        core = self._llm.engine_core
        self._outbox.post(lambda: core.abort_requests_async(ids))
        if work.stage == "prefill":
            # The core may have finished it just now, in which case it ignores the abort and holds a lease.
            for request_id in ids:
                self._post_release(request_id, None)

    def _fail(self, work: Any, code: str, message: str, retryable: bool, param: str | None = None) -> None:
        ids = work.open_ids()
        self._flush()
        self._end(work)
        if ids and code != "engine_dead":
            self._llm.output_processor.abort_requests(ids, internal=True)
            core = self._llm.engine_core
            self._outbox.post(lambda: core.abort_requests_async(ids))
        self._sink.failed(Failed(work.attempt_id, work.stage, code, message, retryable, param))

    def _on_deadline(self, work: Any) -> None:
        attempt_id, stage = work.attempt_id, work.stage
        self._flush()
        self._abort(work)
        self._sink.failed(
            Failed(
                attempt_id,
                stage,
                "deadline",
                f"the {stage} did not end in {work.msg.timeout_s:.1f} s",
                False,
            )
        )

    # ------------------------------------------------------------------------------------------------ leases

    def _release_leases(self, attempt_id: str) -> None:
        for request_id, core in self._leases.of(attempt_id):
            self._post_release(request_id, core)

    def _post_release(self, request_id: str, core: int | None) -> None:
        self._releases += 1
        name, params = f"release-{self._releases}", {RELEASE: [request_id]}
        rank = core if self._config.data_parallel_size > 1 else None
        llm = self._llm
        self._outbox.post(
            lambda: llm.notify_kv_transfer_request_rejected(name, params, data_parallel_rank=rank)
        )

    def _give_up(self, remote: dict[str, Any]) -> None:
        """Tell the lender of `remote` that nobody here will read it."""
        self._releases += 1
        name, llm = f"unread-{self._releases}", self._llm
        self._outbox.post(lambda: llm.notify_kv_transfer_request_rejected(name, remote))

    # ----------------------------------------------------------------------------------------------- outputs

    def _on_output(self, stream: Any, output: Any) -> None:
        """vLLM's output processor has an output (or the engine's death) for one choice."""
        work = stream.work
        if work.ended:
            return
        if isinstance(output, Exception):
            self._fail(work, "engine_dead", f"the vLLM engine died: {output}", True)
            return
        reason = output.outputs[0].finish_reason
        if output.finished:
            stream.done = True
            self._streams.pop(stream.request_id, None)
        if reason in ("error", "abort"):
            self._on_refused(work, reason)
        elif work.stage == "prefill":
            self._on_prefilled(work, stream, output)
        else:
            self._on_tokens(work, stream, output)

    def _on_refused(self, work: Any, reason: str) -> None:
        if reason == "abort":
            self._fail(work, "draining", "the vLLM engine gave the request up", True)
        elif work.remote is not None and work.generated_tokens == 0:
            self._fail(work, "kv_load", "the KV could not be loaded from the prefill engine", True)
        elif work.msg.params.get("response_format") is not None and work.generated_tokens == 0:
            self._fail(work, "bad_request", "the grammar of response_format failed", False, "response_format")
        else:
            self._fail(work, "internal", "vLLM ended the request with an error; see the engine's log", True)

    def _on_prefilled(self, work: Any, stream: Any, output: Any) -> None:
        if not output.finished:
            return
        if not output.kv_transfer_params or not output.kv_transfer_params.get("remote_block_ids"):
            self._fail(work, "internal", "the prefill ended without KV to hand over", True)
            return
        self._end(work)
        port = int(output.kv_transfer_params["remote_port"])
        core = port - int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        self._leases.granted(work.attempt_id, stream.request_id, core)
        self._sink.prefill_done(
            self._work.prefill_done(work, output, float(self._config.lease_s), self._block_bytes)
        )

    def _on_tokens(self, work: Any, stream: Any, output: Any) -> None:
        if not work.admitted:
            self._admit(work, output.num_cached_tokens or 0)
        work.generated_tokens += len(output.outputs[0].token_ids)
        try:
            piece = self._work.out(work, stream, output)
        except (
            Exception
        ) as e:  # a model's output that vLLM's parser cannot take must not stop the other requests
            log.exception("the output of %s could not be parsed", work.attempt_id)
            self._fail(work, "internal", f"the output could not be parsed: {e!r}", False)
            return
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._flush)
        self._batch.append(piece)
        siblings, work.siblings = work.siblings, []
        for index, request in siblings:
            self._submit(work, index, request)
        if output.finished:
            work.finished_choices += 1
            if work.finished_choices == work.choices:
                self._end(work)

    def _flush(self) -> None:
        """Everything that one engine step has put out."""
        items, self._batch = self._batch, []
        if items:
            self._sink.tokens(items)

    def _admit(self, work: Any, cached_tokens: int) -> None:
        work.admitted = True
        self._sink.admitted(
            Admitted(work.attempt_id, work.transfer_bytes, work.transfer_s, work.descriptors, cached_tokens)
        )

    def _on_transfer(self, transfer: Transfer) -> None:
        """A worker has pulled (or failed to pull) the KV of a request; the last worker's report admits it."""
        stream = self._streams.get(transfer.request_id)
        if stream is None or stream.work.ended:
            return
        work = stream.work
        work.transfer_reports += 1
        work.transfer_bytes += transfer.bytes
        work.transfer_s = max(work.transfer_s, transfer.seconds)
        work.descriptors += transfer.descriptors
        work.kv_failed |= not transfer.ok
        if (
            work.transfer_reports == self._config.tensor_parallel_size
            and not work.kv_failed
            and not work.admitted
        ):
            self._admit(work, (work.remote or {}).get("remote_prefill_cached_tokens") or 0)

    def _on_unsent(self, work: Any, error: Exception) -> None:
        if work is not None and not work.ended:
            self._fail(work, "engine_dead", f"the vLLM engine took no request: {error}", True)

    # ------------------------------------------------------------------------------------------------ counts

    def status(self) -> Status:
        running, waiting = self._ledger.requests()
        # The core reports after its steps, and a step may take seconds: what it has not seen yet waits.
        waiting = max(waiting, len(self._streams) - running)
        used = self._ledger.used_blocks(self._blocks)
        decodes = [work for work in self._works.values() if work.stage == "decode"]
        return Status(
            engine_id=self._config.engine_id,
            running=running,
            waiting=waiting,
            kv_blocks_used=used,
            leases=len(self._leases),
            kv_usage=used / max(1, self._info.kv_blocks),
            state="draining" if self._draining else "ready",
            tokens_in_flight=_kv_tokens(decodes),
            ranks=[self._rank_status(rank) for rank in range(self._info.dp_ranks)]
            if self._info.dp_ranks > 1
            else [],
        )

    def _rank_status(self, rank: int) -> Status:
        """What one data-parallel rank counts. Requests that vLLM placed itself are in its core's counts only."""
        core = self._ledger.cores.get(rank, CoreCounts())
        sent = sum(stream.work.msg.dp_rank == rank for stream in self._streams.values())
        works = [w for w in self._works.values() if w.stage == "decode" and w.msg.dp_rank == rank]
        return Status(
            engine_id=self._config.engine_id,
            running=core.running,
            waiting=max(core.waiting, sent - core.running),
            kv_blocks_used=round(core.kv_usage * self._blocks),
            leases=self._leases.on_core(rank),
            kv_usage=core.kv_usage,
            tokens_in_flight=_kv_tokens(works),
        )

    def metrics(self) -> EngineMetrics:
        return self._ledger.metrics(self._info.kv_blocks, self._ledger.used_blocks(self._blocks))


def _kv_tokens(decodes: list[Any]) -> int:
    """Prompt and generated tokens of some decode works."""
    return sum(len(work.msg.tokens) * work.choices + work.generated_tokens for work in decodes)
