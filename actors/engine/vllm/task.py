"""One prefill or decode inside a vLLM engine, and the pure conversion of vLLM's outputs into messages."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from actors.engine.vllm.connector import PROMPT
from actors.engine.vllm.connector.handle import fault, is_of, name_of
from actors.engine.vllm.params import prompt_logprobs, token_logprobs
from actors.wire.messages import Decode, Out, Prefill, PrefillDone, Resume
from policies.request.stage import Task

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreRequest

    from actors.engine.vllm.tools import ChoiceParser


class Stream:
    """The outputs of one choice. vLLM's output processor delivers them directly to the engine, without a queue.

    A Stream replaces vLLM's RequestOutputCollector, of which the output processor uses only `put`.
    """

    __slots__ = ("_deliver", "done", "index", "request_id", "task", "unsent")

    def __init__(
        self,
        deliver: "Callable[[Stream, RequestOutput | Exception], None]",
        task: "EngineTask",
        index: int,
        request_id: str,
    ) -> None:
        self._deliver = deliver
        self.task = task
        self.index = index
        self.request_id = request_id
        self.done = False
        # Pieces of a resumed choice that precede those of this engine.
        self.unsent: list[Out] = []

    def put(self, output: "RequestOutput | Exception") -> None:
        """Delivers an output, or the exception that ended the engine."""
        self._deliver(self, output)


@dataclass(eq=False)
class EngineTask:
    """One prefill or decode of this engine that has not ended."""

    kind: Task
    msg: Prefill | Decode
    choices: int = 1
    streams: list[Stream] = field(default_factory=list)
    # Choices (index, vLLM's request) that start after the first one's first token, on the blocks that it pulled.
    siblings: "list[tuple[int, EngineCoreRequest]]" = field(default_factory=list)
    remote: dict[str, Any] | None = None
    # The handle of the prefix that another engine lends this prefill.
    lent: dict[str, Any] | None = None
    admitted: bool = False
    ended: bool = False
    finished_choices: int = 0
    generated_tokens: int = 0
    transfer_reports: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    held_s: float = 0.0
    level: int | None = None
    descriptors: int = 0
    kv_failed: bool = False
    # The field of the request from which a grammar for the output was made.
    grammar: str | None = None
    timer: asyncio.TimerHandle | None = None
    parsers: "dict[int, ChoiceParser]" = field(default_factory=dict)

    @property
    def attempt_id(self) -> str:
        return self.msg.attempt_id

    @property
    def resume(self) -> Resume | None:
        """The part of this decode's one choice that another engine has generated, if it goes on with one."""
        return self.msg.resume if isinstance(self.msg, Decode) else None

    @property
    def indices(self) -> range:
        """The choices that this task generates."""
        first = 0 if self.resume is None else self.resume.choice
        return range(first, first + self.choices)

    @property
    def kv_tokens(self) -> int:
        """Number of prompt tokens of all choices and of generated tokens, here or by another engine."""
        before = 0 if self.resume is None else self.resume.n_tokens
        return len(self.msg.tokens) * self.choices + before + self.generated_tokens

    def open_ids(self) -> list[str]:
        """Returns vLLM's request ids of the choices that have not finished."""
        return [stream.request_id for stream in self.streams if not stream.done]


def computed(msg: Prefill | Decode) -> list[int]:
    """Returns the tokens whose KV is there before a decode's own first one: prompt and output of another engine."""
    return [*msg.tokens, *(() if msg.resume is None else msg.resume.token_ids)]


def prefill_done(
    task: EngineTask, output: "RequestOutput", lease_s: float, kv_bytes_per_block: int
) -> PrefillDone:
    """Returns the message about a finished prefill, with its handle. `output` is its last output."""
    handle = {
        **output.kv_transfer_params,
        "remote_prefill_cached_tokens": output.num_cached_tokens,
        PROMPT: name_of(computed(task.msg)),
    }
    blocks = max((len(group) for group in handle["remote_block_ids"]), default=0)
    stats = output.metrics
    return PrefillDone(
        attempt_id=task.attempt_id,
        handle=msgspec.msgpack.encode(handle),
        prompt_tokens=len(task.msg.tokens),
        cached_tokens=output.num_cached_tokens or 0,
        lease_s=lease_s,
        queue_s=max(0.0, stats.scheduled_ts - stats.queued_ts),
        compute_s=max(0.0, stats.first_token_ts - stats.scheduled_ts),
        kv_bytes=blocks * kv_bytes_per_block,
    )


class BadHandle(ValueError):
    """A KV handle that no vLLM engine has made, or that names the KV of another prompt."""


def decode_handle(handle: bytes, tokens: Sequence[int], least: int = 0) -> dict[str, Any]:
    """Returns the kv_transfer_params in a handle. Raises BadHandle if no vLLM engine has made it, or if its KV is not
    that of the first of these tokens, `least` of them at least.
    """
    try:
        params = msgspec.msgpack.decode(handle)
    except msgspec.DecodeError as e:
        raise BadHandle(f"not a KV handle of a vLLM engine: {e}") from e
    if not isinstance(params, dict):
        raise BadHandle(
            f"not a KV handle of a vLLM engine: a {type(params).__name__} where an object is expected"
        )
    if wrong := fault(params):
        raise BadHandle(f"not a KV handle of a vLLM engine: {wrong}")
    try:
        fits = is_of(params, tokens, least)
    except OverflowError as e:
        raise BadHandle(f"the prompt has a number that is no token: {e}") from e
    if not fits:
        raise BadHandle("the handle names the KV of another prompt")
    return params


def out(task: EngineTask, stream: Stream, output: "RequestOutput") -> Out:
    """Returns one piece of one choice, with logprobs if they were asked for. A parsed output is in `delta`; `text` is
    then empty.
    """
    completion = output.outputs[0]
    params = task.msg.params
    top = params.get("logprobs")
    prompt_top = params.get("prompt_logprobs")
    ids = list(completion.token_ids)
    text, finish, delta, chars = completion.text, completion.finish_reason, None, 0
    if task.parsers:
        delta, finish = task.parsers[stream.index].delta(text, ids, finish)
        text, chars = "", len(text)
    return Out(
        attempt_id=task.attempt_id,
        text=text,
        n_tokens=len(ids),
        index=stream.index,
        finish=finish,
        stop_reason=completion.stop_reason,
        token_ids=ids,
        logprobs=token_logprobs(ids, completion.logprobs, top)
        if top is not None and completion.logprobs
        else None,
        delta=delta,
        prompt_logprobs=(
            prompt_logprobs(output.prompt_token_ids, output.prompt_logprobs, prompt_top)
            if prompt_top is not None and output.prompt_logprobs
            else None
        ),
        chars=chars,
    )
