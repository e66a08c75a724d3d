"""Messages between ingress and router: what happens to a request, the decisions about it, the fleet, and the questions
of an administrator.
"""

from typing import Literal, NamedTuple

import msgspec

from actors.telemetry.times import Stamps
from actors.wire.messages.base import Count, Part, Tier, Wire
from actors.wire.messages.engines import EngineInfo, Status
from actors.wire.messages.flows import FlowAgentStatus
from actors.wire.messages.observing import ObserverInfo
from actors.wire.messages.scaling import Standby
from policies.request.ended import RequestEnd
from policies.request.events import Lend
from policies.request.stage import Outcome, Task
from policies.request.terms import NO_TERMS, Terms

# ------------------------------------------------------------------------------------------------- ingress -> router


class PromptSignals(Part, frozen=True):
    """Counts taken from a prompt's text for the predictors (`predictors.text.signals`); the text itself is not sent."""

    chars: int
    last_turn_chars: int
    question_marks: int
    code_marks: int
    list_marks: int
    requested_words: int | None


class Hints(Part, frozen=True):
    """Facts about a request beyond its size: sampling parameters, keyed digests of the prompt and of the user's name,
    and signals of the prompt's text. A field is None if the ingress does not know it.
    """

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_strings: int | None = None
    structured_output: bool | None = None
    prompt_key: str | None = None
    template_key: str | None = None
    signals: PromptSignals | None = None
    user: str | None = None


class Submit(Wire, frozen=True):
    """An attempt that needs a prefill engine. `slots` is the number of sequences that it will decode (n). `terms` are
    what the client asked of the service. `age_s` is how long ago the request reached its ingress; the router subtracts
    it from its own clock to know when the request's total time is over. `waits_s` is how long the client has waited for
    its next token: the TTFT objective of a retry counts from the arrival of the request, and that of an attempt that
    resumes output from the last token before it.

    `avoid` names the engines at which earlier attempts failed. `hints` are sent only if the router's Fleet has
    `wants_hints`. `block_hashes` (packed by `actors.wire.kv`) are the hashes of those KV blocks of the prompt that a
    prefix cache can serve; they are sent only if the router's Fleet names a size in `block_tokens`, which is then the
    size used. `client_request_id` is the client's own x-request-id, or "" if it sent none. `resumed_tokens` of the
    `prompt_tokens` are output that earlier attempts generated; `max_tokens` is what may still follow. `trace` is the
    request's place in its trace, as W3C's header `traceparent`, or None unless the request is sampled.
    """

    attempt_id: str
    prompt_tokens: Count
    max_tokens: Count
    slots: Count = 1
    terms: Terms = NO_TERMS
    age_s: float = 0.0
    avoid: tuple[str, ...] = ()
    hints: Hints | None = None
    block_hashes: bytes = b""
    block_tokens: Count = 0
    client_request_id: str = ""
    resumed_tokens: Count = 0
    again: bool = False
    waits_s: float = 0.0
    trace: str | None = None


class PrefillReported(Wire, frozen=True):
    """The prefill is done, and the attempt enters the prompt pool. `lease_s` is the remaining time of the KV lease. The
    engine computed the prompt for `compute_s`.

    `engine_id` and `dp_rank` say where the KV is held, for a router that has adopted the attempt before it knew that
    engine. A router that does not know the attempt in this stage answers with Unknown.
    """

    attempt_id: str
    lease_s: float
    kv_bytes: Count
    cached_tokens: Count
    engine_id: str = ""
    dp_rank: int | None = None
    compute_s: float = 0.0


class LeaseRenewed(Wire, frozen=True):
    """The lease on the KV of an attempt in the prompt pool lasts for `lease_s` more seconds."""

    attempt_id: str
    lease_s: float


class Grown(NamedTuple):
    """Number of tokens that an attempt has generated so far, over all its sequences."""

    attempt_id: str
    tokens: Count


class Progress(Wire, frozen=True):
    """Two lists: the attempts `admitted` at decode engines since the last Progress, and those that have `grown`."""

    admitted: list[str]
    grown: list[Grown]


class Transfer(Part, frozen=True):
    """One KV transfer that has ended, as the decode engine measured it. `seconds` leaves out the time `held_s` for
    which a flow scheduler held the transfer back. `ended_ago_s` is the time between its end and this message.
    """

    attempt_id: str
    n_bytes: Count
    seconds: float
    descriptors: Count
    ended_ago_s: float
    held_s: float = 0.0


class Transferred(Wire, frozen=True):
    """The KV transfers that have ended since the last such message: all of them if the router's Fleet has
    `wants_transfers`, else those that a flow scheduler held back, whose holds `explain` shows.
    """

    items: list[Transfer]


class TimesTold(Wire, frozen=True):
    """The moments of an attempt that came with `trace` and ends now, at ingress and engines, for `explain`. It comes
    before Closed.
    """

    attempt_id: str
    stamps: tuple[Stamps, ...]


class Adopt(Wire, frozen=True):
    """An attempt in progress that a router does not know, or knows in another stage; the router replaces what it knew.
    After a reconnect to the router, the ingress sends one for each attempt that has an engine.

    `engine_id` is the engine that computes or holds the attempt's KV, and `decode_engine_id` the one that decodes it
    (the same engine for a colocated attempt). `dp_rank` and `decode_dp_rank` are the ranks there.

    A pooled attempt came into the pool `pooled_ago_s` ago. `lease_s` is the remaining time of its lease, which was
    granted for `granted_s` at first and last renewed `renewed_ago_s` ago (None: never).
    """

    submit: Submit
    stage: Literal["prefilling", "pooled", "transferring", "decoding"]
    engine_id: str | None
    decode_engine_id: str | None = None
    tokens: Count = 0
    lease_s: float = 0.0
    kv_bytes: Count = 0
    dp_rank: int | None = None
    decode_dp_rank: int | None = None
    pooled_ago_s: float = 0.0
    granted_s: float | None = None
    renewed_ago_s: float | None = None


class Closed(Wire, frozen=True):
    """The attempt is over, and the router gives back all its charges. At the router an attempt ends by this message, by
    the router's own Reject, or with its ingress's connection. `engine_id` and `task` name the engine that failed and
    what it was doing; `code` is that of its Failed, "engine_lost" where its connection was lost, or None.

    `output_tokens` are those of the attempt. `ended` says how the whole request went, as its client saw it; it is sent
    once a request, with the attempt that ends it, and is None where the request goes on in another attempt. Where the
    router has rejected that attempt, or never got it, this message comes for the sake of `ended` alone.
    """

    attempt_id: str
    outcome: Outcome
    output_tokens: Count = 0
    engine_id: str | None = None
    task: Task | None = None
    code: str | None = None
    ended: RequestEnd | None = None


class Admin(Wire, frozen=True):
    """A question of an administrator that an ingress or an observer passes on to the router. `body` is JSON
    (`actors.router.admin`).
    `ask` numbers the questions of one connection.
    """

    ask: int
    what: Literal[
        "policy", "set_policy", "explain", "journal", "scale", "facts", "assign", "logs", "set_logs"
    ]
    body: bytes = b""


# ------------------------------------------------------------------------------------------------- router -> ingress


class RoutePrefill(Wire, frozen=True):
    """Decision: prefill the attempt on `engine_id`, on its rank `dp_rank` (None: the engine chooses). A `colocated`
    attempt is also decoded there; the KV of any other attempt will move to a decode engine. With `lend` another engine
    first lends it the prompt's prefix.

    For an attempt in the prompt pool the decision means that its lease ends before a slot becomes free: the ingress
    releases the KV, and the prefill is done again.
    """

    attempt_id: str
    engine_id: str
    colocated: bool
    dp_rank: int | None = None
    lend: Lend | None = None


class RouteDecode(Wire, frozen=True):
    """Decision: decode the attempt on `engine_id`, on its rank `dp_rank` (None: the engine chooses). Its KV must be
    there within `kv_due_s` seconds of the decision (None: no time is set). `tier` is that of the network between the
    nodes of both engines, None where no tiers are configured.
    """

    attempt_id: str
    engine_id: str
    dp_rank: int | None = None
    kv_due_s: float | None = None
    tier: Tier | None = None


class Reject(Wire, frozen=True):
    """The router does not serve the attempt, and all its charges are given back. `status` is 429 if the queue is full.
    It is 503 if no engine can serve the attempt, or if the attempt waited too long in the queue or in the pool.
    `detail` says more than `reason` where there is more to say.
    """

    attempt_id: str
    status: int
    reason: str
    retry_after_s: float
    detail: str = ""


class Unknown(Wire, frozen=True):
    """The router does not know the attempt, or knows it in another stage than a message of its ingress implies (after a
    restart of the router, say). The ingress answers with Adopt.
    """

    attempt_id: str


class Fleet(Wire, frozen=True):
    """All live engines, the names of the policies, and the facts that the policies need from the ingresses. The router
    sends it to a new connection and at every change. `block_tokens` is the size of the blocks in which to hash prompts;
    with None no hashes are needed. `standby` is what an autoscaler has told of the fleet's sleep; None: nothing yet.
    Each ingress connects to the `observers` and tells them what it counts.
    """

    engines: list[EngineInfo]
    prefill_policy: str
    decode_policy: str
    wants_hints: bool = False
    block_tokens: int | None = None
    wants_transfers: bool = False
    standby: Standby | None = None
    observers: tuple[ObserverInfo, ...] = ()


class Quarantined(Part, frozen=True):
    """A worker that the router keeps from new work because it fails or is slow (`policies.state.outliers`).

    `rank` is its rank, or None if its engine has one only. `reason` is "failing", or the figure by which it is slow. It
    has been quarantined for `for_s` seconds, gets a probe `probe_in_s` seconds from now, or is `probing` now. `times`
    counts its quarantines in a row, failed probes included.
    """

    engine_id: str
    rank: int | None
    reason: str
    for_s: float
    probe_in_s: float
    probing: bool
    failure_rate: float
    times: int


class FleetLoad(Part, frozen=True):
    """The load of the fleet by FlowKV's rule (`policies.routing.flowkv.regimes`).

    `regime` is "normal", "imbalanced" or "extreme". `prefill` and `decode` are the mean load scores of the nodes of the
    role, or None if it has none. `idle` has the ids of the workers that could take on the other role.
    """

    regime: str
    prefill: float | None
    decode: float | None
    idle: tuple[str, ...] = ()


class FleetStatus(Wire, frozen=True):
    """The last status of each engine, the router's own gauges, and its monotonic totals; sent about once a second.
    `ingresses` is the number of connected ingresses, `quarantined` names the workers that get no work but probes,
    `load` says how loaded the fleet is, and `flows` has the connected flow agents.

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
    gauges: dict[str, float] = msgspec.field(default_factory=dict)
    ingresses: int = 0
    quarantined: list[Quarantined] = msgspec.field(default_factory=list)
    load: FleetLoad | None = None
    flows: tuple[FlowAgentStatus, ...] = ()


class AdminAnswer(Wire, frozen=True):
    """The answer to question `ask`: an HTTP `status` and a JSON `body`, which is {"message"} if `status` is above
    200.
    """

    ask: int
    status: int
    body: bytes
