"""Every message that crosses a Sluice socket, in one file.

Who talks to whom (DESIGN section 2): the ingress owns a request for its whole life. It asks the router where to run
it, sends the work to the engines itself, streams the tokens to the client and tells the router what happened.

    ingress -> router   Submit, Prefilled, Progress, Transferred, Adopt, Closed, Admin
    router  -> ingress  RoutePrefill, RouteDecode, Reject, Fleet, FleetStatus, AdminAnswer
    ingress -> engine   Prefill, Decode, Cancel, ReleaseKV
    engine  -> ingress  PrefillDone, Admitted, Tokens, Failed
    engine  -> router   Announce, Status, KvEvents, KvState
    router  -> engine   KvReplay, KvStop
    engine  -> engine   Pull, PullGrant, Pulled (sim engine only)

Ownership is bound to the connection: when an ingress connection closes, an engine aborts and frees everything that came
over it, and the router gives back every charge of it. Messages are arrays on the wire (no field names), tagged with
their class name. Times are durations in seconds, or absolute `time.time()` seconds where the name says `_at_s`.
"""

from typing import Any, Literal

import msgspec

PROTOCOL_VERSION = 1

Role = Literal["prefill", "decode", "colocated"]
EngineKind = Literal["vllm", "sim"]
Mode = Literal["colocated", "disaggregated"]
EngineState = Literal["starting", "ready", "draining", "down"]

KV_EVENTS = "kv_events"
"""The feature of an engine that tells the router what its prefix cache holds."""


class _Wire(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Base of all messages: immutable, array encoded, tagged by class name."""


# ---------------------------------------------------------------------------------------------------- handshake


class Hello(_Wire, frozen=True):
    """First message of every connection, both ways. `proof` is an HMAC over the peer's nonce where a secret is set."""

    version: int
    kind: Literal["ingress", "router", "engine"]
    id: str
    nonce: bytes = b""


class Prove(_Wire, frozen=True):
    """Answer to the peer's Hello: HMAC-SHA256(secret, both nonces, own kind and id, peer's id). Sent only where a
    secret is configured.
    """

    mac: bytes


# ------------------------------------------------------------------------------------------------------- engines


class EngineInfo(_Wire, frozen=True):
    """What an engine announces once, and the router passes on to every ingress.

    `group` is NIXL's compatibility group (engine version, model, layout, dtype): KV never crosses groups. `slots` is
    beta_max, the most sequences that decode at once; `addresses` are tried in order (`unix:/path`, `tcp:host:port`).
    `node` is Ray's id of its node, or the name in its group's `topology`; `labels` say where that node is
    (`actors.engine.topology`).

    An engine of `dp_ranks` data-parallel ranks has so many schedulers, each with an equal share of `slots` and
    `kv_blocks`; with a `barrier` they step together.
    """

    id: str
    role: Role
    kind: EngineKind
    model: str
    group: str
    addresses: tuple[str, ...]
    slots: int
    kv_blocks: int
    block_size_tokens: int
    max_model_len: int
    node: str
    pid: int
    lease_s: float
    state: EngineState = "ready"
    features: tuple[str, ...] = ()
    replica: str = ""
    labels: dict[str, str] = {}
    dp_ranks: int = 1
    barrier: bool = False


class Announce(_Wire, frozen=True):
    """Engine -> router: I exist (also sent again after a reconnect, and when `state` changes)."""

    info: EngineInfo


class Status(_Wire, frozen=True):
    """Engine -> router, periodically: what the engine itself counts. A term it does not know is None, never 0.

    FlowKV's indicators: `swapped` requests; of the step's token budget, of compute and of memory bandwidth the share
    in use, 0..1. An engine of several ranks counts all of them together, and each in `ranks`.
    """

    engine_id: str
    running: int
    waiting: int
    kv_blocks_used: int
    leases: int
    kv_usage: float
    state: EngineState = "ready"
    tokens_in_flight: int | None = None
    totals: dict[str, float] = {}
    swapped: int | None = None
    token_budget: float | None = None
    compute: float | None = None
    memory_bandwidth: float | None = None
    ranks: "list[Status]" = []


class KvChange(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What entered or left a prefix cache (`policies.engine_model.blocks.Change`); see `actors.wire.kv` for the bytes.

    `parent` is the hash before the first stored block, None at the prompt's start.
    """

    kind: Literal["stored", "removed", "cleared"]
    hashes: bytes = b""
    parent: int | None = None


class KvEvents(_Wire, frozen=True):
    """Engine -> router: batch `seq` of the changes of one rank's prefix cache, numbered from 0 in each `epoch` (one
    life of the engine). Sent within a report period, from the first KvReplay of a connection on until KvStop.
    """

    engine_id: str
    epoch: str
    seq: int
    changes: list[KvChange]
    rank: int = 0


class KvReplay(_Wire, frozen=True):
    """Router -> engine: batches `first`..`last` of `epoch` again (`last` None: up to now), and all that follow.
    Answered by KvEvents, or by KvState where the engine does not have them any more, the epoch is another one, or
    `first` is None.
    """

    epoch: str
    first: int | None
    last: int | None = None
    rank: int = 0


class KvStop(_Wire, frozen=True):
    """Router -> engine: no policy looks at prefix hits any more, send no more KvEvents of `rank`."""

    rank: int = 0


class KvState(_Wire, frozen=True):
    """Engine -> router: part `part` of `parts` of all that a rank's prefix cache holds before batch `next_seq`, as
    chains (KvChange of kind "stored", a chain after those that it hangs on).
    """

    engine_id: str
    epoch: str
    next_seq: int
    part: int
    parts: int
    chains: list[KvChange]
    rank: int = 0


# ---------------------------------------------------------------------------------------------- ingress -> engine


class Prefill(_Wire, frozen=True):
    """Compute the KV of `tokens` and hold it under a lease; the engine's own sampled token is discarded.

    `deadline_s` counts from receipt: past it the engine aborts the work and answers Failed(code="deadline").
    `dp_rank` None leaves the data-parallel rank to the engine.
    """

    rid: str
    tokens: list[int]
    params: dict[str, Any]
    deadline_s: float
    priority: int = 0
    dp_rank: int | None = None


class Decode(_Wire, frozen=True):
    """Generate. With `handle` the KV is pulled from the prefill engine first; without it the engine computes all
    itself.

    `params` are the OpenAI sampling fields that were given, nothing else: max_tokens, temperature, top_p, top_k, min_p,
    seed, stop (list), stop_token_ids, ignore_eos, min_tokens, n, logprobs (int), prompt_logprobs (int),
    presence_penalty, frequency_penalty, repetition_penalty, logit_bias, response_format, skip_special_tokens, detail
    fields of `chat`. `chat` carries the original chat request where the engine must parse its output (tools); the
    deltas then come ready made in `Out.delta`. `dp_rank` None leaves the data-parallel rank to the engine.
    """

    rid: str
    tokens: list[int]
    params: dict[str, Any]
    handle: bytes | None
    deadline_s: float
    priority: int = 0
    chat: bytes | None = None
    dp_rank: int | None = None


class Cancel(_Wire, frozen=True):
    """Stop `rid` whatever its stage; frees slot and blocks. Idempotent; an unknown rid is no error. Not answered."""

    rid: str


class ReleaseKV(_Wire, frozen=True):
    """Give back the KV that the prefill of `rid` holds under its lease, because no decode will ever pull it.
    Idempotent.
    """

    rid: str


# ---------------------------------------------------------------------------------------------- engine -> ingress


class PrefillDone(_Wire, frozen=True):
    """The KV of `rid` is ready under `handle` (opaque bytes that the decode engine understands) for `lease_s`."""

    rid: str
    handle: bytes
    prompt_tokens: int
    cached_tokens: int
    lease_s: float
    queue_s: float
    compute_s: float
    kv_bytes: int


class Admitted(_Wire, frozen=True):
    """The decode engine holds the KV now (or needs none) and the prefill engine's copy is given back by the engines."""

    rid: str
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    descriptors: int = 0
    cached_tokens: int = 0


class Out(_Wire, frozen=True):
    """One piece of output of one choice. `finish` is None until the last; `text` may be empty (held back stop string).

    `logprobs`: per token, (token text, token id, logprob, [(text, id, logprob), ...]) where asked. `delta`: a ready
    OpenAI delta as JSON where the engine parses (tools). `prompt_logprobs` comes with the first piece where asked.
    """

    rid: str
    text: str
    n_tokens: int
    index: int = 0
    finish: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    logprobs: list[Any] | None = None
    delta: bytes | None = None
    prompt_logprobs: list[Any] | None = None


class Tokens(_Wire, frozen=True):
    """All output of one engine step for one connection; at c = 1 it has one entry."""

    items: list[Out]


class Failed(_Wire, frozen=True):
    """`rid` ended on this engine without finishing. `retryable`: the same work may succeed elsewhere or later.

    code: "deadline", "kv_load", "bad_request", "engine_dead", "draining", "overloaded", "unknown_handle", "internal".
    """

    rid: str
    stage: Literal["prefill", "decode"]
    code: str
    message: str
    retryable: bool
    param: str | None = None


# ---------------------------------------------------------------------------------------- ingress <-> router


class Submit(_Wire, frozen=True):
    """A request asks for a prefill engine. `slots` = sequences it will decode (n); `local`: must not be split;
    `mode`: only engines of this kind may serve it.

    `deadline_s` is what is left of its total time. `hints` (actors.router.forecasts.Hints) come where the router's
    `Fleet.wants_hints`. `block_hashes` (bytes by `actors.wire.kv`) are of the prompt's KV blocks of `block_tokens`
    tokens that a prefix cache can serve; they come where the router's `Fleet.block_tokens`.
    `request_id`: the client's own x-request-id, where it sent one.
    """

    rid: str
    prompt_tokens: int
    max_tokens: int
    slots: int = 1
    priority: int = 0
    request_class: str = "standard"
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    session: str = ""
    deadline_s: float = 600.0
    local: bool = False
    avoid: tuple[str, ...] = ()
    hints: bytes = b""
    mode: Mode | None = None
    block_hashes: bytes = b""
    block_tokens: int = 0
    request_id: str = ""


class Prefilled(_Wire, frozen=True):
    """The prefill is done: the request enters the prompt pool. `lease_s` is what is left of the KV lease."""

    rid: str
    lease_s: float
    kv_bytes: int
    cached_tokens: int


class Progress(_Wire, frozen=True):
    """Batched: (rid, event, value) with event "prefill" (started), "admitted", "tokens" (value = total so far)."""

    items: list[tuple[str, str, int]]


class Transferred(_Wire, frozen=True):
    """Batched, where the router's `Fleet.wants_transfers`: KV transfers that have ended, as the engines measured them.

    Items: (rid, bytes, seconds, descriptors, seconds since it ended). Time that a flow scheduler held it is not in it.
    """

    items: list[tuple[str, int, float, int, float]]


class Adopt(_Wire, frozen=True):
    """A request under way that a new router cannot know: sent for each decided request after a reconnect to the router.

    stage: "prefill", "pool" (with what is left of its lease) or "decode"; `engine_id` is where its KV is computed or
    kept, `decode_engine_id` where it decodes (the same for a colocated one); with their ranks.
    """

    submit: Submit
    stage: Literal["prefill", "pool", "decode"]
    engine_id: str | None
    decode_engine_id: str | None = None
    tokens: int = 0
    lease_s: float = 0.0
    kv_bytes: int = 0
    dp_rank: int | None = None
    decode_dp_rank: int | None = None


class Closed(_Wire, frozen=True):
    """The request is over, however it ended; the router gives back all its charges. The one way out.

    outcome: "finished", "cancelled", "failed", "rejected", "expired"; `engine_id` is the culprit of a failure.
    """

    rid: str
    outcome: str
    output_tokens: int = 0
    engine_id: str | None = None
    stage: str | None = None


class RoutePrefill(_Wire, frozen=True):
    """Decision: run `rid` on `engine_id`, on its `dp_rank` (None: the engine chooses). mode: "prefill" (KV will move)
    or "colocated" (prefill and decode there).

    For a request that waits in the pool it means: its lease ends before a slot is free; release that KV, prefill again.
    """

    rid: str
    engine_id: str
    mode: Literal["prefill", "colocated"]
    queue_s: float = 0.0
    dp_rank: int | None = None


class RouteDecode(_Wire, frozen=True):
    """Decision: decode `rid` on `engine_id`, there on `dp_rank` (None: the engine's choice)."""

    rid: str
    engine_id: str
    pool_s: float = 0.0
    dp_rank: int | None = None


class Reject(_Wire, frozen=True):
    """The router will not (429: queue full; 503: no engine, expired in pool) serve `rid` now. All charges are given
    back.
    """

    rid: str
    status: int
    reason: str
    retry_after_s: float


class Fleet(_Wire, frozen=True):
    """Router -> ingress: the whole list of live engines, sent at connect and at every change; plus the policy names.

    `block_tokens`: hash prompts in blocks of so many tokens, because the policies look at prefix hits; None: do not.
    """

    engines: list[EngineInfo]
    prefill_policy: str
    decode_policy: str
    wants_hints: bool = False
    block_tokens: int | None = None
    wants_transfers: bool = False


class FleetStatus(_Wire, frozen=True):
    """Router -> ingress about once a second: the engines' last statuses, the router's own gauges and monotonic totals.

    `statuses[i].totals` holds the engine's EngineMetrics fields. `decision_buckets` are cumulative counts of decision
    times at the upper bounds (s) in `decision_bounds_s`, +Inf last.
    """

    statuses: list[Status]
    queued: int
    pool: int
    in_flight: int
    leases: int
    totals: dict[str, float]
    decision_bounds_s: tuple[float, ...] = ()
    decision_buckets: tuple[int, ...] = ()
    decision_sum_s: float = 0.0
    gauges: dict[str, float] = {}


class Admin(_Wire, frozen=True):
    """An administrator asks the router through an ingress; `body` is JSON (`actors.router.admin`). `ask` numbers the
    questions of one connection.
    """

    ask: int
    what: Literal["policy", "set_policy", "explain", "journal"]
    body: bytes = b""


class AdminAnswer(_Wire, frozen=True):
    """The answer to `ask`: JSON; `status` as in HTTP, and with one above 200 the body is {"message"}."""

    ask: int
    status: int
    body: bytes


# ---------------------------------------------------------------------- engine <-> engine (sim engine's transfer)


class Pull(_Wire, frozen=True):
    """Sim decode engine -> sim prefill engine: I start to read `n_bytes` of the KV of `rid`; keep it until Pulled."""

    rid: str
    n_bytes: int = 0


class PullGrant(_Wire, frozen=True):
    """Answer to Pull: `ok` False where the KV is gone (lease expired, released, engine restarted). `paced`: a Sent
    follows when the bytes have arrived; else the reader knows itself how long they take.
    """

    rid: str
    ok: bool
    kv_bytes: int = 0
    paced: bool = False


class Sent(_Wire, frozen=True):
    """Sim prefill engine -> sim decode engine: the bytes of a paced Pull have arrived, after `seconds`."""

    rid: str
    seconds: float


class Pulled(_Wire, frozen=True):
    """The read has ended; the prefill engine frees its copy."""

    rid: str


Message = (
    Hello
    | Prove
    | Announce
    | Status
    | KvEvents
    | KvReplay
    | KvStop
    | KvState
    | Prefill
    | Decode
    | Cancel
    | ReleaseKV
    | PrefillDone
    | Admitted
    | Tokens
    | Failed
    | Submit
    | Prefilled
    | Progress
    | Transferred
    | Adopt
    | Closed
    | RoutePrefill
    | RouteDecode
    | Reject
    | Fleet
    | FleetStatus
    | Admin
    | AdminAnswer
    | Pull
    | PullGrant
    | Sent
    | Pulled
)
