"""Ingress <-> engine: the work, its output, and its end."""

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
    """Generate the output. With `handle` the engine first pulls the KV from the prefill engine; without it the engine
    computes the prompt itself.

    `params` are the OpenAI sampling fields that the client gave, and no others: max_tokens, temperature, top_p, top_k,
    min_p, seed, stop (list), stop_token_ids, ignore_eos, min_tokens, n, logprobs (int), prompt_logprobs (int),
    presence_penalty, frequency_penalty, repetition_penalty, logit_bias, response_format, skip_special_tokens. `chat`
    carries the original chat request where the engine must parse its output (tools); the deltas then come ready made
    in `Out.delta`. `dp_rank` None leaves the data-parallel rank to the engine.
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
    """Stop the attempt, whatever its stage, and free its slot and blocks. Idempotent; an unknown id is no error. The
    engine does not answer.
    """

    attempt_id: str


class ReleaseKV(Wire, frozen=True):
    """Free the KV that the attempt's prefill holds under its lease: no decode engine will pull it. Idempotent."""

    attempt_id: str


class PrefillDone(Wire, frozen=True):
    """The attempt's KV is ready under `handle` (opaque bytes that the decode engine understands) for `lease_s`.

    The prompt waited for `queue_s` in the engine and took `compute_s`; `cached_tokens` of it came from a prefix cache.
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
    """The decode engine holds the KV now (or needs none); the engines free the prefill engine's copy themselves."""

    attempt_id: str
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    descriptors: int = 0
    cached_tokens: int = 0


class Out(Part, frozen=True):
    """One piece of output of one choice. `finish` is None until the last piece. `text` may be empty while the engine
    holds back what could become a stop string.

    Where the client asked for them, `logprobs` hold (token text, token id, logprob, [(text, id, logprob), ...]) for
    each token, and `prompt_logprobs` come with the first piece. `delta` is a ready OpenAI delta as JSON where the
    engine parses its output (tools).
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
    """All output of one engine step for one connection."""

    items: list[Out]


class Failed(Wire, frozen=True):
    """The attempt ended on this engine without finishing. With `retryable` it may succeed elsewhere or later. `param`
    names the field of the request that is at fault.

    `code` is one of "deadline", "kv_load", "bad_request", "engine_dead", "draining", "overloaded", "unknown_handle" and
    "internal".
    """

    attempt_id: str
    task: Task
    code: str
    message: str
    retryable: bool
    param: str | None = None
