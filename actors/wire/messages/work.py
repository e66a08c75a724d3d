"""Messages between ingress and engine: the work, its output, and its end."""

from typing import Any

from actors.telemetry.times import Stamps
from actors.wire.messages.base import Count, Part, TokenId, Wire
from policies.request.stage import Task


class Resume(Part, frozen=True):
    """The part of choice `choice` that another engine has generated; its output goes on here.

    `n_tokens` tokens came, with the ids `token_ids` (empty where the engine sends none), and the client has got the
    first `chars` characters of their text. The engine computes what the prefill engine has not computed of their KV,
    counts them as output (for limits, penalties, grammars and stop strings), and sends what follows: the text from
    `chars` on, and later tokens.
    """

    choice: Count
    n_tokens: Count
    token_ids: list[TokenId]
    chars: Count


class Prefill(Wire, frozen=True):
    """Computes the KV of `tokens`, and with `resume` that of output which another engine has generated, and holds it
    under a lease. The token that the engine samples at the end is discarded.

    `timeout_s` counts from receipt; when it is over, the engine aborts the work and answers Failed(code="deadline").
    With `dp_rank` None the engine chooses the data-parallel rank.

    `params` and `chat` are those of the decode that follows. The engine checks them, so that a request which no decode
    engine would take is refused before its prompt is computed.

    `prefix` is the handle (`PrefillDone.handle`) of a prefill on another engine of the first tokens of this one; the
    engine reads them there and computes the rest. If it cannot read them it computes them, so no prefill fails for its
    prefix.

    `trace` is the request's place in its trace, as W3C's header `traceparent`, or None unless the request is sampled.
    """

    attempt_id: str
    tokens: list[int]
    params: dict[str, Any]
    timeout_s: float
    priority: int = 0
    dp_rank: int | None = None
    chat: bytes | None = None
    prefix: bytes | None = None
    resume: Resume | None = None
    trace: str | None = None


class Decode(Wire, frozen=True):
    """Generates the output. With `handle` the engine first pulls the KV from the prefill engine; without it the engine
    computes the prompt itself.

    `params` are the OpenAI sampling fields that the client gave, and no others: max_tokens, temperature, top_p, top_k,
    min_p, seed, stop (list), stop_token_ids, ignore_eos, min_tokens, n, logprobs (int), prompt_logprobs (int),
    presence_penalty, frequency_penalty, repetition_penalty, logit_bias, response_format, skip_special_tokens, and
    `cache_salt`: requests with different ones, or one without, share no KV. `chat` is the original chat request if the
    engine must parse its output (tools); `Out.delta` then holds ready OpenAI deltas.
    With `dp_rank` None the engine chooses the data-parallel rank.

    The KV is due `kv_due_s` seconds after receipt (None: no time is set): a flow scheduler orders reads by that.

    With `resume` only that one choice is generated (`n` is then 1), from where it was interrupted; `Out.index` is its
    `choice`. `max_tokens` and `min_tokens` still count from the first token of the choice. `trace` is that of Prefill.
    """

    attempt_id: str
    tokens: list[int]
    params: dict[str, Any]
    handle: bytes | None
    timeout_s: float
    priority: int = 0
    chat: bytes | None = None
    dp_rank: int | None = None
    resume: Resume | None = None
    kv_due_s: float | None = None
    trace: str | None = None


class Cancel(Wire, frozen=True):
    """Stops the attempt in any stage and frees its slot and blocks. Idempotent; an unknown id is no error. The engine
    does not answer.
    """

    attempt_id: str


class ReleaseKV(Wire, frozen=True):
    """Frees the KV that the attempt's prefill holds under a lease, since no decode engine will pull it. Idempotent."""

    attempt_id: str


class RenewKV(Wire, frozen=True):
    """Asks for a longer lease on the KV that the attempt's prefill holds, because the attempt still waits for a decode
    engine. The engine answers with KVRenewed.
    """

    attempt_id: str


class KVRenewed(Wire, frozen=True):
    """The lease on the attempt's KV lasts for `lease_s` more seconds. 0: the engine does not renew it, or has ended it;
    a lease that is not renewed ends when it would have ended.
    """

    attempt_id: str
    lease_s: float


class Reading(Wire, frozen=True):
    """The decode engine has a slot and KV blocks for the attempt, and begins to read its KV. It is not sent where
    nothing is read.
    """

    attempt_id: str


class PrefillDone(Wire, frozen=True):
    """The attempt's KV is ready for `lease_s` under `handle`, which is opaque bytes that the decode engine understands.

    The prompt waited for `queue_s` in the engine, and its computation took `compute_s`. The KV of `cached_tokens` of
    its tokens came from a prefix cache.
    """

    attempt_id: str
    handle: bytes
    prompt_tokens: Count
    cached_tokens: Count
    lease_s: float
    queue_s: float
    compute_s: float
    kv_bytes: Count


class Admitted(Wire, frozen=True):
    """The decode engine now holds the attempt's KV, or needs none from elsewhere. The prefill engine's copy is freed by
    the engines themselves. The transfer took `transfer_s` for `transfer_bytes` in `descriptors` pieces, without the
    time `held_s` for which a flow scheduler held it back. `level` is the lowest priority level (the largest number) at
    which a part of it was permitted, None without a scheduler.
    """

    attempt_id: str
    transfer_bytes: Count = 0
    transfer_s: float = 0.0
    descriptors: Count = 0
    cached_tokens: Count = 0
    held_s: float = 0.0
    level: int | None = None


class Out(Part, frozen=True):
    """One piece of output of one choice. `finish` is None until the last piece. `text` may be empty while the engine
    holds back what could become a stop string.

    If the client asked for them, `logprobs` has (token text, token id, logprob, [(text, id, logprob), ...]) for each
    token, and the first piece has `prompt_logprobs`. `delta` is a ready OpenAI delta as JSON if the engine parses its
    output (tools). `text` is then empty, and `chars` is the number of characters of raw output that the parser got for
    this piece.
    """

    attempt_id: str
    text: str
    n_tokens: Count
    index: Count = 0
    finish: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[TokenId] | None = None
    logprobs: list[Any] | None = None
    delta: bytes | None = None
    prompt_logprobs: list[Any] | None = None
    chars: Count = 0


class Tokens(Wire, frozen=True):
    """All output that one engine step has for one connection."""

    items: list[Out]


class Timed(Wire, frozen=True):
    """The moments of a task that came with `trace`, as its engine saw them. Sent once a task, before its PrefillDone or
    its first Tokens.
    """

    attempt_id: str
    stamps: Stamps


class Failed(Wire, frozen=True):
    """The attempt ended on this engine without finishing. If `retryable`, it may succeed on another engine or later.
    `param` names the field of the request that caused the failure.

    `code` is one of "deadline", "kv_load", "bad_request", "bad_output", "engine_dead", "stalled", "draining",
    "overloaded", "unknown_handle", "not_resumable" and "internal". "bad_output" says that the output broke the grammar
    that the request asks for, or could not be read as tool calls: nothing is wrong with the engine. An engine that
    stalls, dies or ends its drain fails all its open work. With "not_resumable" it refuses a `Decode.resume` that it
    cannot carry out, and says in words why. An engine that stalls had stood still for `silent_s` seconds: what it got
    in them did not stop it.
    """

    attempt_id: str
    task: Task
    code: str
    message: str
    retryable: bool
    param: str | None = None
    silent_s: float = 0.0
