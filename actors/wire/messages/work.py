"""Ingress <-> engine: the work, its output, and how it ended."""

from typing import Any

from actors.wire.messages.base import Part, Wire
from policies.request.stage import Task


class Prefill(Wire, frozen=True):
    """Compute the KV of `tokens` and hold it under a lease; the engine's own sampled token is discarded.

    `timeout_s` counts from receipt: when it is over, the engine aborts the work and answers Failed(code="deadline").
    `dp_rank` None leaves the data-parallel rank to the engine.
    """

    attempt_id: str
    tokens: list[int]
    params: dict[str, Any]
    timeout_s: float
    priority: int = 0
    dp_rank: int | None = None


class Decode(Wire, frozen=True):
    """Generate. With `handle` the KV is pulled from the prefill engine first; without it the engine computes all
    itself.

    `params` are the OpenAI sampling fields that were given, nothing else: max_tokens, temperature, top_p, top_k, min_p,
    seed, stop (list), stop_token_ids, ignore_eos, min_tokens, n, logprobs (int), prompt_logprobs (int),
    presence_penalty, frequency_penalty, repetition_penalty, logit_bias, response_format, skip_special_tokens, detail
    fields of `chat`. `chat` carries the original chat request where the engine must parse its output (tools); the
    deltas then come ready made in `Out.delta`. `dp_rank` None leaves the data-parallel rank to the engine.
    """

    attempt_id: str
    tokens: list[int]
    params: dict[str, Any]
    handle: bytes | None
    timeout_s: float
    priority: int = 0
    chat: bytes | None = None
    dp_rank: int | None = None


class Cancel(Wire, frozen=True):
    """Stop `attempt_id` whatever its stage; frees slot and blocks. Idempotent; an unknown attempt_id is no error.
    Not answered.
    """

    attempt_id: str


class ReleaseKV(Wire, frozen=True):
    """Give back the KV that the prefill of `attempt_id` holds under its lease, because no decode will ever pull it.
    Idempotent.
    """

    attempt_id: str


class PrefillDone(Wire, frozen=True):
    """The KV of `attempt_id` is ready under `handle` (opaque bytes that the decode engine understands) for
    `lease_s`.
    """

    attempt_id: str
    handle: bytes
    prompt_tokens: int
    cached_tokens: int
    lease_s: float
    queue_s: float
    compute_s: float
    kv_bytes: int


class Admitted(Wire, frozen=True):
    """The decode engine holds the KV now (or needs none) and the prefill engine's copy is given back by the engines."""

    attempt_id: str
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    descriptors: int = 0
    cached_tokens: int = 0


class Out(Part, frozen=True):
    """One piece of output of one choice. `finish` is None until the last; `text` may be empty (held back stop string).

    `logprobs`: per token, (token text, token id, logprob, [(text, id, logprob), ...]) where asked. `delta`: a ready
    OpenAI delta as JSON where the engine parses (tools). `prompt_logprobs` comes with the first piece where asked.
    """

    attempt_id: str
    text: str
    n_tokens: int
    index: int = 0
    finish: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    logprobs: list[Any] | None = None
    delta: bytes | None = None
    prompt_logprobs: list[Any] | None = None


class Tokens(Wire, frozen=True):
    """All output of one engine step for one connection; at c = 1 it has one entry."""

    items: list[Out]


class Failed(Wire, frozen=True):
    """`attempt_id` ended on this engine without finishing. `retryable`: the same work may succeed elsewhere or later.

    code: "deadline", "kv_load", "bad_request", "engine_dead", "draining", "overloaded", "unknown_handle", "internal".
    """

    attempt_id: str
    task: Task
    code: str
    message: str
    retryable: bool
    param: str | None = None
