"""The prefills and decodes of a vLLM engine, from the ingress's message to their end.

Requests go to vLLM's core as token ids and come back as outputs of whole engine steps. vLLM would wake one asyncio task
per request and step. Here its output processor writes into `Stream`s that collect a step's output, so one engine step
leads to one `sink.tokens` call. Adds, aborts and releases leave through one `Outbox`, so they leave in the order in
which they were requested.

This module imports vLLM, so it is loaded only after `launch` has prepared the process.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.stats import IterationStats

from actors.engine.leases import AttemptLeases
from actors.engine.protocol import Sink
from actors.engine.vllm import params, prompt_end, resume, seam
from actors.engine.vllm.config import VllmEngineConfig
from actors.engine.vllm.connector import DUE, ENDS, RELEASE, RENEW
from actors.engine.vllm.outbox import Outbox
from actors.engine.vllm.renewals import Renewals
from actors.engine.vllm.stats import Transfer
from actors.engine.vllm.task import BadHandle, EngineTask, Stream, computed, decode_handle, out, prefill_done
from actors.engine.vllm.tools import ToolParsing
from actors.telemetry.logs import about
from actors.wire.messages import Admitted, Decode, Failed, KVRenewed, Out, Prefill, Reading, Resume
from policies.request.stage import Task

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.tasks import SupportedTask
    from vllm.v1.engine import EngineCoreRequest

log = logging.getLogger(__name__)

_BLAME_S = 0.1
"""Seconds between an output and the report of its step. ASSUMPTION: vLLM records a step right after its outputs, with a
few turns of the event loop between at most."""


class TaskRunner:
    """All tasks of one engine, its leases, and its calls to vLLM's core. All methods belong to one event loop."""

    def __init__(
        self,
        config: VllmEngineConfig,
        llm: AsyncLLM,
        sink: Sink,
        tools: ToolParsing,
        supported: "tuple[SupportedTask, ...]",
        leases: AttemptLeases,
        block_bytes: int,
    ) -> None:
        """Makes a runner without tasks. `supported` are vLLM's task names; `block_bytes` is the size of a KV block over
        all workers.
        """
        self._config, self._llm, self._sink = config, llm, sink
        self._supported = supported
        self._leases = leases
        self._block_bytes = block_bytes
        self._tools = tools
        self._defaults: dict[str, Any] = llm.model_config.get_diff_sampling_param()
        self._tasks: dict[tuple[Task, str], EngineTask] = {}
        self._batch: list[Out] = []
        self._outbox = Outbox(self._on_unsent)
        self._outbox.start()
        self._releases = 0
        loop = asyncio.get_running_loop()
        self.renewals = Renewals(leases, self._post_renewals, self._on_renewal, loop.time, loop.call_soon)
        # the streams of unfinished choices, by vLLM's request id
        self.streams: dict[str, Stream] = {}
        self.draining = False

    @property
    def busy(self) -> bool:
        """Whether there is a task that has not ended."""
        return bool(self._tasks)

    @property
    def decodes(self) -> list[EngineTask]:
        """The decodes that have not ended."""
        return [task for task in self._tasks.values() if task.kind == "decode"]

    def stop(self) -> None:
        """Fails all tasks, and sends nothing more to the core."""
        self.draining = True
        self._outbox.stop()
        for task in list(self._tasks.values()):
            self._fail(task, "engine_dead", f"engine {self._config.engine_id} was stopped", True)

    # -------------------------------------------------------------------------------------------- requests

    def prefill(self, msg: Prefill) -> None:
        """Computes the prompt and keeps its KV under a lease."""
        if not self._accepts("prefill", msg.attempt_id):
            return
        task = EngineTask("prefill", msg, lent=self._lent(msg))
        try:
            request = self._prefill_request(task, msg)
        except params.BadParameter as e:
            self._forgo(task)
            self._sink.failed(Failed(msg.attempt_id, "prefill", "bad_request", str(e), False, e.param))
            return
        except Exception as e:
            self._forgo(task)
            self._unexpected(msg, "prefill", e)
            return
        self._begin(task)
        self._submit(task, 0, request)

    def decode(self, msg: Decode) -> None:
        """Generates the output; with a handle the KV is pulled first."""
        if not self._accepts("decode", msg.attempt_id):
            return
        try:
            task = EngineTask("decode", msg, choices=params.sequences(msg.params))
            seam.check(msg, task.choices, self._llm.vllm_config)
            requests = [self._request(msg, sampling) for sampling in self._choice_params(task)]
        except params.BadParameter as e:
            self._sink.failed(Failed(msg.attempt_id, "decode", "bad_request", str(e), False, e.param))
            return
        except seam.NotResumable as e:
            self._sink.failed(Failed(msg.attempt_id, "decode", "not_resumable", str(e), True))
            return
        except BadHandle as e:
            self._sink.failed(Failed(msg.attempt_id, "decode", "unknown_handle", str(e), True))
            return
        except Exception as e:
            self._unexpected(msg, "decode", e)
            return
        self._begin(task)
        pulling = task.remote is not None
        for index, request in zip(task.indices, requests, strict=True):
            if index > task.indices[0] and pulling:
                task.siblings.append((index, request))
            else:
                self._submit(task, index, request)

    def _prefill_request(self, task: EngineTask, msg: Prefill) -> "EngineCoreRequest":
        """Returns vLLM's request for a prefill, which computes the output of another engine as well as the prompt.
        Raises BadParameter.
        """
        output = () if msg.resume is None else msg.resume.token_ids
        return self._request(msg, self._prefill_params(task, msg), output)

    def _prefill_params(self, task: EngineTask, msg: Prefill) -> "SamplingParams":
        """Returns the SamplingParams of a prefill. Raises BadParameter for whatever its decode would refuse."""
        params.sequences(msg.params)
        asked = params.sampling_params(msg.params, self._defaults)
        # An engine without a parser of its own may prefill for one that has it.
        if msg.chat is not None and self._tools.parser is not None:
            self._tools.session(msg.chat, msg.tokens).adjust(asked)
        try:
            self._llm.input_processor._validate_params(asked, self._supported)
        except params.REFUSALS as e:
            raise params.bad_parameter(e) from e
        task.grammar = _grammar(msg.params, asked)
        return params.prefill_params(asked.structured_outputs, task.lent)

    def _lent(self, msg: Prefill) -> dict[str, Any] | None:
        """Returns the handle of the prefix that is lent to a prefill, or None. A prefill does not fail for its prefix:
        with a handle that is none, or of another prompt, the whole prompt is computed.
        """
        if msg.prefix is None:
            return None
        try:
            return {**decode_handle(msg.prefix, msg.tokens), ENDS: time.monotonic() + msg.timeout_s}
        except BadHandle as e:
            log.warning(
                "%s computes its whole prompt, because its lent prefix cannot be read: %s", msg.attempt_id, e
            )
            return None

    def _choice_params(self, task: EngineTask) -> "list[SamplingParams]":
        """Returns the SamplingParams of each choice, of which the first pulls the KV. Raises BadParameter or
        BadHandle.
        """
        msg = task.msg
        assert isinstance(msg, Decode)
        given = msg.params
        if msg.resume is not None and msg.resume.n_tokens:
            # They came with the first token of the first engine.
            given = {name: value for name, value in given.items() if name != "prompt_logprobs"}
        base = params.sampling_params(given, self._defaults)
        if msg.chat is not None:
            session = self._tools.session(msg.chat, msg.tokens)
            session.adjust(base)
            task.parsers = {index: session.choice() for index in task.indices}
        task.grammar = _grammar(msg.params, base)
        children = [params.child_params(base, index) for index in task.indices]
        if msg.resume is not None:
            resume.carry(children[0], msg.resume.token_ids)
        if msg.handle is not None:
            remote = decode_handle(msg.handle, computed(msg), least=len(msg.tokens))
            if base.prompt_logprobs is not None:
                # For prompt logprobs vLLM computes the prompt itself, so the prefill engine's copy is freed unread.
                self._give_up(remote)
            else:
                task.remote = remote
                now_s = time.monotonic()
                remote[DUE] = None if msg.kv_due_s is None else now_s + msg.kv_due_s
                remote[ENDS] = now_s + msg.timeout_s
                children[0].extra_args = {**(children[0].extra_args or {}), "kv_transfer_params": remote}
        return children

    def _request(
        self, msg: Prefill | Decode, sampling: "SamplingParams", output: Sequence[int] = ()
    ) -> "EngineCoreRequest":
        """Returns the request for vLLM, whose prompt ends with the `output` of another engine. Raises BadParameter if
        vLLM refuses the prompt or a parameter.
        """
        prompt = tokens_input([*msg.tokens, *output], cache_salt=params.cache_salt(msg.params))
        try:
            request = self._llm.input_processor.process_inputs(
                msg.attempt_id, prompt, sampling, supported_tasks=self._supported,
                priority=msg.priority, data_parallel_rank=msg.dp_rank, trace_headers=self._trace_headers(msg),
            )  # fmt: skip
        except params.REFUSALS as e:
            raise params.bad_parameter(e) from e
        self._llm.input_processor.assign_request_id(request)
        return request

    def _trace_headers(self, msg: Prefill | Decode) -> dict[str, str] | None:
        """Returns what puts vLLM's span of a sampled request below the request's own. vLLM carries it through each of
        its outputs, so it gets none where it makes no spans.
        """
        if msg.trace is None or not self._llm.output_processor.tracing_enabled:
            return None
        return {"traceparent": msg.trace}

    def _unexpected(self, msg: Prefill | Decode, kind: Task, error: Exception) -> None:
        """Fails one request over which vLLM raised an unexpected error. Other requests go on.

        A request with a schema or tools of its client's is at fault itself: vLLM runs much code over these. A fault of
        the engine would let any client have engines quarantined. An engine that is broken fails other requests, too.
        """
        attempt_id = msg.attempt_id
        log.error(
            "vLLM could not take the %s of %s", kind, attempt_id, exc_info=error, extra=about(attempt_id)
        )
        field = "tools" if msg.chat is not None else "response_format"
        if msg.chat is not None or msg.params.get(field) is not None:
            said = f"vLLM cannot read '{field}' of this request: use a simpler schema, or none"
            self._sink.failed(Failed(attempt_id, kind, "bad_request", said, False, field))
            return
        message = f"vLLM could not take the request: {error!r}; see the engine's log"
        self._sink.failed(Failed(attempt_id, kind, "internal", message, False))

    def cancel(self, attempt_id: str) -> None:
        """Ends the tasks of `attempt_id` without an answer, and gives its leases back."""
        for task in (self._tasks.get(("prefill", attempt_id)), self._tasks.get(("decode", attempt_id))):
            if task is not None:
                self._abort(task)
        self._release_leases(attempt_id)

    def release(self, attempt_id: str) -> None:
        """Gives the leases of `attempt_id` back. A prefill that has no lease yet is ended."""
        task = self._tasks.get(("prefill", attempt_id))
        if task is not None:
            self._abort(task)
        self._release_leases(attempt_id)

    # ------------------------------------------------------------------------------------------ life of a task

    def _accepts(self, kind: Task, attempt_id: str) -> bool:
        if self.draining:
            self._sink.failed(
                Failed(
                    attempt_id, kind, "draining", f"engine {self._config.engine_id} is shutting down", True
                )
            )
            return False
        if (kind, attempt_id) in self._tasks:
            message = f"engine {self._config.engine_id} already runs a {kind} of {attempt_id}"
            self._sink.failed(Failed(attempt_id, kind, "internal", message, False))
            return False
        return True

    def _begin(self, task: EngineTask) -> None:
        self._tasks[task.kind, task.attempt_id] = task
        delay_s = max(0.0, task.msg.timeout_s)
        task.timer = asyncio.get_running_loop().call_later(delay_s, self._on_deadline, task)

    def _end(self, task: EngineTask) -> None:
        """Forgets a task. Every task ends here."""
        task.ended = True
        self._tasks.pop((task.kind, task.attempt_id), None)
        if task.timer is not None:
            task.timer.cancel()
        for stream in task.streams:
            self.streams.pop(stream.request_id, None)

    def _submit(self, task: EngineTask, index: int, request: "EngineCoreRequest") -> None:
        stream = Stream(self._on_output, task, index, request.request_id)
        task.streams.append(stream)
        self.streams[request.request_id] = stream
        self._llm.output_processor.add_request(request, None, None, index, stream)
        if task.kind == "decode":
            prompt_end.mend(self._llm.output_processor.request_states[request.request_id])
        if task.resume is not None and self._resume(task, stream, request, task.resume):
            return
        core = self._llm.engine_core
        self._outbox.post(lambda: core.add_request_async(request), task)

    def _resume(self, task: EngineTask, stream: Stream, request: "EngineCoreRequest", before: Resume) -> bool:
        """Makes a choice's text and parser go on after `before`. Returns whether the choice ends with that already, so
        that the core is not needed.
        """
        processor = self._llm.output_processor
        state = processor.request_states[request.request_id]
        limit = self._llm.model_config.max_model_len
        try:
            primed = seam.prime(state, request, before, task.parsers.get(stream.index), limit)
        except seam.NotResumable as e:
            self._forgo(task)
            self._fail(task, "not_resumable", str(e), True)
            return True
        except Exception as e:
            told = about(task.attempt_id)
            log.exception(
                "what %s had put out before it came here could not be read", task.attempt_id, extra=told
            )
            self._forgo(task)
            self._fail(task, "not_resumable", f"the answer so far could not be read: {e!r}", True)
            return True
        stream.unsent = [
            Out(task.attempt_id, "", 0, stream.index, token_ids=[], delta=delta, chars=chars)
            for delta, chars in primed.unsent
        ]
        if primed.end is None:
            return False
        self._forgo(task)
        # vLLM's span, where it makes spans, asks for the figures of the step
        step = (time.monotonic(), IterationStats()) if processor.tracing_enabled else (None, None)
        processor.process_outputs([primed.end], *step)
        return True

    def _forgo(self, task: EngineTask) -> None:
        """Gives the lender of a request's KV its copy back unread."""
        for handle in (task.remote, task.lent):
            if handle is not None:
                self._give_up(handle)

    def _abort(self, task: EngineTask) -> None:
        """Ends a task without an answer. The core frees its blocks, and ends a running pull with the lender."""
        ids = task.open_ids()
        self._end(task)
        self._batch = [piece for piece in self._batch if piece.attempt_id != task.attempt_id]
        self._abort_requests(task, ids)

    def _abort_requests(self, task: EngineTask, ids: list[str]) -> None:
        """Ends requests of a task in the output processor and in the core."""
        self._llm.output_processor.abort_requests(ids, internal=True)
        core = self._llm.engine_core
        self._outbox.post(lambda: core.abort_requests_async(ids))
        if task.kind == "prefill":
            # The core may have just finished the prefill; it then ignores the abort and holds a lease. Without a rank
            # in the message nobody here knows which core it was.
            rank = task.msg.dp_rank
            holders = range(self._config.data_parallel_size) if rank is None else (rank,)
            for request_id in ids:
                for holder in holders:
                    self._post_release(request_id, holder)

    def _fail(
        self, task: EngineTask, code: str, message: str, retryable: bool, param: str | None = None
    ) -> None:
        ids = task.open_ids()
        self._flush()
        self._end(task)
        if ids and code != "engine_dead":
            self._abort_requests(task, ids)
        self._sink.failed(Failed(task.attempt_id, task.kind, code, message, retryable, param))

    def _recompute(self, task: EngineTask) -> None:
        """Begins a prefill anew, without the prefix that was lent to it."""
        assert isinstance(task.msg, Prefill)
        ids, task.lent = task.open_ids(), None
        try:
            request = self._prefill_request(task, task.msg)
        except Exception as e:
            self._fail(
                task, "kv_load", f"the lent prefix could not be read, nor the prompt computed: {e!r}", True
            )
            return
        for stream in task.streams:
            # vLLM reports the abort as an output of the old request, which is nothing of the new one.
            stream.done = True
            self.streams.pop(stream.request_id, None)
        task.streams.clear()
        self._abort_requests(task, ids)
        self._submit(task, 0, request)

    def _on_deadline(self, task: EngineTask) -> None:
        self._flush()
        self._abort(task)
        self._sink.failed(
            Failed(
                task.attempt_id,
                task.kind,
                "deadline",
                f"the {task.kind} did not end in {task.msg.timeout_s:.1f} s",
                False,
            )
        )

    # ------------------------------------------------------------------------------------------------ leases

    def _release_leases(self, attempt_id: str) -> None:
        for request_id, core in self._leases.of(attempt_id):
            self._post_release(request_id, core)

    def _post_release(self, request_id: str, core: int) -> None:
        self._post_wish("release", {RELEASE: [request_id]}, core)

    def _post_renewals(self, leases: dict[str, float], core: int) -> None:
        self._post_wish("renewal", {RENEW: leases}, core)

    def _on_renewal(self, attempt_id: str, left_s: float) -> None:
        self._sink.renewed(KVRenewed(attempt_id, left_s))

    def _post_wish(self, kind: str, wish: dict[str, Any], core: int | None) -> None:
        """Sends a core a wish about leases, as a request that is aborted on arrival (`connector`)."""
        self._releases += 1
        name, llm = f"{kind}-{self._releases}", self._llm
        rank = core if self._config.data_parallel_size > 1 else None
        self._outbox.post(
            lambda: llm.notify_kv_transfer_request_rejected(name, wish, data_parallel_rank=rank)
        )

    def _give_up(self, remote: dict[str, Any]) -> None:
        """Tells the lender of `remote` that this engine will not read its KV."""
        self._releases += 1
        name, llm = f"unread-{self._releases}", self._llm
        self._outbox.post(lambda: llm.notify_kv_transfer_request_rejected(name, remote))

    # ----------------------------------------------------------------------------------------------- outputs

    def _on_output(self, stream: Stream, output: "RequestOutput | Exception") -> None:
        """Takes an output of one choice, or the error that ended the engine, from vLLM's output processor."""
        task = stream.task
        if task.ended or stream.done:
            return
        if isinstance(output, Exception):
            self._fail(task, "engine_dead", f"the vLLM engine died: {output}", True)
            return
        reason = output.outputs[0].finish_reason
        if output.finished:
            stream.done = True
            self.streams.pop(stream.request_id, None)
        if reason in ("error", "abort"):
            self._on_refused(task, reason)
        elif task.kind == "prefill":
            self._on_prefilled(task, stream, output)
        else:
            self._on_tokens(task, stream, output)

    def _on_refused(self, task: EngineTask, reason: str) -> None:
        if reason == "abort":
            self._fail(task, "draining", "the vLLM engine gave the request up", True)
        elif task.generated_tokens > 0:
            # vLLM does so where a grammar does not accept the tokens that were sampled under it
            code = "internal" if task.grammar is None else "bad_output"
            self._fail(task, code, "vLLM ended the request with an error; see the engine's log", True)
        elif task.remote is not None and task.grammar is None:
            self._fail(task, "kv_load", "the KV could not be loaded from the prefill engine", True)
        elif task.remote is not None:
            # Either the pull or the grammar failed; the step's report of its pulls comes right after its outputs.
            self.streams[task.streams[0].request_id] = task.streams[0]
            asyncio.get_running_loop().call_later(_BLAME_S, self._blame, task)
        else:
            self._blame(task)

    def _blame(self, task: EngineTask) -> None:
        """Fails a task that vLLM refused before its first token, for a pull that failed or else for its grammar."""
        if task.ended:
            return
        if task.kv_failed:
            self._fail(task, "kv_load", "the KV could not be loaded from the prefill engine", True)
        elif task.grammar is not None and task.resume is not None and task.resume.n_tokens:
            message = f"the grammar of {task.grammar} does not accept the answer so far"
            self._fail(task, "not_resumable", message, True)
        elif task.grammar is not None:
            self._fail(task, "bad_request", f"the grammar of {task.grammar} failed", False, task.grammar)
        else:
            self._fail(task, "internal", "vLLM ended the request with an error; see the engine's log", True)

    def _on_prefilled(self, task: EngineTask, stream: Stream, output: "RequestOutput") -> None:
        if not output.finished:
            return
        if not output.kv_transfer_params or not output.kv_transfer_params.get("remote_block_ids"):
            self._fail(task, "internal", "the prefill ended without KV to hand over", True)
            return
        self._end(task)
        port = int(output.kv_transfer_params["remote_port"])
        core = port - int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        self._leases.granted(task.attempt_id, stream.request_id, core)
        self._sink.prefill_done(prefill_done(task, output, float(self._config.lease_s), self._block_bytes))

    def _on_tokens(self, task: EngineTask, stream: Stream, output: "RequestOutput") -> None:
        if not task.admitted:
            self._admit(task, output.num_cached_tokens or 0)
        task.generated_tokens += len(output.outputs[0].token_ids)
        try:
            piece = out(task, stream, output)
        except Exception as e:
            # An output that vLLM's parser cannot handle must not stop the other requests.
            log.exception(
                "the output of %s could not be parsed", task.attempt_id, extra=about(task.attempt_id)
            )
            code = "bad_output" if task.parsers else "internal"
            self._fail(task, code, f"the output could not be parsed: {e!r}", False)
            return
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._flush)
        unsent, stream.unsent = stream.unsent, []
        self._batch += [*unsent, piece]
        siblings, task.siblings = task.siblings, []
        for index, request in siblings:
            self._submit(task, index, request)
        if output.finished:
            task.finished_choices += 1
            if task.finished_choices == task.choices:
                self._end(task)

    def _flush(self) -> None:
        """Sends everything that one engine step has put out."""
        items, self._batch = self._batch, []
        if items:
            self._sink.tokens(items)

    def _admit(self, task: EngineTask, cached_tokens: int) -> None:
        task.admitted = True
        self._sink.admitted(
            Admitted(
                task.attempt_id,
                task.transfer_bytes,
                task.transfer_s,
                task.descriptors,
                cached_tokens,
                task.held_s,
                task.level,
            )
        )

    def on_transfer(self, transfer: Transfer) -> None:
        """Adds up a worker's report of its pull of a request's KV. The last worker's report admits the request if no
        pull failed.
        """
        stream = self.streams.get(transfer.request_id)
        if stream is None or stream.task.ended:
            return
        task = stream.task
        if task.kind == "prefill":
            return
        task.transfer_reports += 1
        task.transfer_bytes += transfer.bytes
        task.transfer_s = max(task.transfer_s, transfer.seconds)
        task.descriptors += transfer.descriptors
        task.held_s = max(task.held_s, transfer.held_s)
        task.level = max(filter(None, (task.level, transfer.level)), default=None)
        task.kv_failed |= not transfer.ok
        if (
            task.transfer_reports == self._config.tensor_parallel_size
            and not task.kv_failed
            and not task.admitted
        ):
            self._admit(task, (task.remote or {}).get("remote_prefill_cached_tokens") or 0)

    def on_reading(self, request_id: str) -> None:
        """Tells the ingress that a decode has its blocks and that its KV is read now."""
        stream = self.streams.get(request_id)
        if stream is None or stream.task.kind == "prefill":
            return
        if not stream.task.ended and not stream.task.admitted:
            self._sink.reading(Reading(stream.task.attempt_id))

    def on_overdue(self, request_id: str) -> None:
        """Fails the decode whose read of KV takes too long; a prefill computes its whole prompt instead. The blocks
        stay until the read has ended.
        """
        stream = self.streams.get(request_id)
        if stream is None or stream.task.ended:
            return
        if stream.task.lent is not None:
            self._recompute(stream.task)
        else:
            self._fail(
                stream.task, "kv_load", "the KV could not be read from the prefill engine in time", True
            )

    def _on_unsent(self, task: EngineTask | None, error: Exception) -> None:
        if task is not None and not task.ended:
            self._fail(task, "engine_dead", f"the vLLM engine took no request: {error}", True)


def _grammar(given: Mapping[str, Any], sampling: "SamplingParams") -> str | None:
    """Returns the field of the request from which the grammar of `sampling` was made, or None without a grammar."""
    if sampling.structured_outputs is None:
        return None
    return "tools" if given.get("response_format") is None else "response_format"
