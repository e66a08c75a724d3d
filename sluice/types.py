"""The typed results of calls. Fields that this version does not know are kept (`extra="allow"`)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Result(BaseModel):
    """Base of all results. They are immutable and keep unknown fields."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())


class Usage(Result):
    """The token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class FunctionCall(Result):
    """The name and the JSON arguments of a tool call; in a stream, pieces of them."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(Result):
    """A call of a tool that the model asks for. In a stream, `index` tells the pieces of several calls apart."""

    id: str | None = None
    index: int | None = None
    type: str | None = None
    function: FunctionCall | None = None


class ChatMessage(Result):
    """A message of a conversation. It can be passed back in `messages` of the next call."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None


class TopLogprob(Result):
    """A likely token and its natural-log probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """The chosen token, with the alternatives that were asked for."""

    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChatLogprobs(Result):
    """The log probabilities of the tokens of a chat choice."""

    content: list[TokenLogprob] | None = None


class CompletionLogprobs(Result):
    """The log probabilities of a completion, in OpenAI's older form of parallel lists."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] = Field(default_factory=list)


class ChatChoice(Result):
    """One of `n` answers to a conversation."""

    index: int = 0
    message: ChatMessage
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class Delta(Result):
    """The piece of a message that a chunk adds."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChunkChoice(Result):
    """The piece of one choice that a chunk adds."""

    index: int = 0
    delta: Delta = Field(default_factory=Delta)
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None

    @property
    def text(self) -> str:
        """The new text, or "" if this chunk brings none."""
        return self.delta.content or ""


class CompletionChoice(Result):
    """One of `n` continuations of a prompt; in a stream, a piece of one."""

    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None


class _Envelope(Result):
    id: str = ""
    object: str = ""
    created: int = 0
    model: str = ""
    usage: Usage | None = None


class ChatCompletion(_Envelope):
    """The answer of `chat`. `request_id` is the response's `x-request-id`."""

    choices: list[ChatChoice]
    request_id: str | None = None

    @property
    def message(self) -> ChatMessage:
        """The first choice's message."""
        return self.choices[0].message

    @property
    def text(self) -> str:
        """The first choice's text, or "" if it has none (a tool call)."""
        content = self.message.content
        return content if isinstance(content, str) else ""


class Completion(_Envelope):
    """The answer of `completions`. `request_id` is the response's `x-request-id`."""

    choices: list[CompletionChoice]
    request_id: str | None = None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


class Chunk(_Envelope):
    """Base of the chunks of a stream. The last chunk carries `usage` and no choice."""


class ChatChunk(Chunk):
    """One event of `stream_chat`."""

    choices: list[ChatChunkChoice] = Field(default_factory=list)

    @property
    def text(self) -> str:
        """The new text of choice 0, or "" if this chunk brings none; `choices` has the others if `n` > 1."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)


class CompletionChunk(Chunk):
    """One event of `stream_completions`."""

    choices: list[CompletionChoice] = Field(default_factory=list)

    @property
    def text(self) -> str:
        """The new text of choice 0, or "" if this chunk brings none; `choices` has the others if `n` > 1."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)


class Model(Result):
    """A served model; `max_model_len` is its context in tokens."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str | None = None
    max_model_len: int | None = None


class ModelList(Result):
    """The answer of GET /v1/models."""

    data: list[Model]


class Health(Result):
    """The server's health: `live` if it answers, `ready` if it can serve requests; if not, `detail` says why."""

    live: bool
    ready: bool
    detail: str | None = None


class Version(Result):
    """The answer of GET /version. `transport` is the server's HTTP implementation: `fast` or `plain`."""

    version: str
    transport: str | None = None


class RoutingPolicies(Result):
    """The names of the policies in use."""

    prefill: str | None = None
    decode: str | None = None


class RouterStatus(Result):
    """The router as the ingress sees it."""

    connected: bool | None = None
    policy: RoutingPolicies | None = None


class QuarantineStatus(Result):
    """Why the router keeps new work from an engine, or from one data-parallel `rank` of it.

    `reason` is `failing`, or `slow_prefill`, `slow_admission` or `slow_decode` for an engine far behind the others of
    its role. It began `for_s` seconds ago; `probe_in_s` seconds from now one request tries the engine, if it is not
    `probing` already. `times` counts the quarantines in a row, with the probes that failed.
    """

    rank: int | None = None
    reason: str | None = None
    for_s: float | None = None
    probe_in_s: float | None = None
    probing: bool | None = None
    failure_rate: float | None = None
    times: int | None = None


class EngineStatus(Result):
    """One engine. `slots` counts sequences, `running` and `waiting` count requests; `kv_usage` is a share of 1."""

    id: str | None = None
    role: str | None = None
    kind: str | None = None
    state: str | None = None
    slots: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_blocks_total: int | None = None
    kv_blocks_used: int | None = None
    kv_usage: float | None = None
    quarantine: list[QuarantineStatus] | None = None


class RequestCounts(Result):
    """Numbers of prompts in the system: all, those that wait for prefill, and those between prefill and decode."""

    in_flight: int | None = None
    queued: int | None = None
    pool: int | None = None


class Status(Result):
    """The answer of GET /sluice/status. Every field but `ready` may be missing."""

    ready: bool
    model: str | None = None
    router: RouterStatus | None = None
    engines: list[EngineStatus] = Field(default_factory=list)
    requests: RequestCounts | None = None
    leases: int | None = None


class Policy(Result):
    """A routing policy: its registered name, all its parameters, and its formula, written with their names."""

    name: str
    params: dict[str, Any] = Field(default_factory=dict)
    formula: str = ""


class Available(Result):
    """All policies that can be chosen, by name, with their default parameters."""

    prefill: dict[str, Policy] = Field(default_factory=dict)
    decode: dict[str, Policy] = Field(default_factory=dict)


class Policies(Result):
    """The policies in use, those that can be chosen (`available`), and the dispatcher's limits (`dispatch`)."""

    prefill: Policy
    decode: Policy
    dispatch: dict[str, Any] = Field(default_factory=dict)
    available: Available = Field(default_factory=Available)


class Ranked(Result):
    """One candidate of a decision, with its cost (the lowest is the best) and the terms that make up the cost."""

    worker: str
    cost: float
    terms: dict[str, float] = Field(default_factory=dict)


class Choice(Result):
    """The outcome of a policy's decision: the chosen worker, the reason for it, and the ranking (best first)."""

    worker: str
    reason: str
    ranking: list[Ranked] = Field(default_factory=list)


class Decision(Result):
    """One decision on a request's way.

    `action` is RoutePrefill, RouteDecode or Reject, and `at_s` is in seconds since 1970. `decision` and `policy` belong
    to the first two actions, `status` and `reject_reason` to the last. `waited_s` is the time in the queue before a
    prefill, or in the prompt pool before a decode. `quarantined` names the workers that were then kept from the policy,
    with the reasons.
    """

    attempt_id: str
    action: str
    at_s: float
    decision: Choice | None = None
    policy: Policy | None = None
    waited_s: float | None = None
    colocated: bool = False
    degraded: bool = False
    status: int | None = None
    reject_reason: str | None = Field(None, alias="reason")
    retry_after_s: float | None = None
    quarantined: dict[str, str] = Field(default_factory=dict)


class Explanation(Result):
    """All decisions made for a request, oldest first.

    A request has an `attempt_id` for each try at each of its prompts.
    """

    id: str
    decisions: list[Decision] = Field(default_factory=list)
