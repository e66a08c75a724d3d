"""Ingress <-> router: the life of a request as the ingress reports it, the decisions about it, the fleet, and the
questions of an administrator.
"""

from typing import Literal, NamedTuple

import msgspec

from actors.wire.messages.base import Part, Wire
from actors.wire.messages.engines import EngineInfo, Status
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
    """An ingress's knowledge of a request beyond its size: sampling parameters, keyed digests of the prompt and of the
    user's name, and signals of the prompt's text. None where the ingress does not know it.
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
    """An attempt asks for a prefill engine. `slots` counts the sequences it will decode (n). `terms` are what the
    client asked of the service. `age_s` is how long ago the request reached its ingress: the router subtracts it from
    its own clock to know when the request's total time is over.

    `avoid` names the engines at which earlier attempts failed. `hints` come where the router's `Fleet.wants_hints`.
    `block_hashes` (bytes by `actors.wire.kv`) are of the prompt's KV blocks of `block_tokens` tokens that a prefix
    cache can serve; they come where the router's `Fleet.block_tokens`. `client_request_id` is the client's own
    x-request-id, "" where it sent none.
    """

    attempt_id: str
    prompt_tokens: int
    max_tokens: int
    slots: int = 1
    terms: Terms = NO_TERMS
    age_s: float = 0.0
    avoid: tuple[str, ...] = ()
    hints: Hints | None = None
    block_hashes: bytes = b""
    block_tokens: int = 0
    client_request_id: str = ""


class PrefillReported(Wire, frozen=True):
    """The prefill is done, and the attempt enters the prompt pool. `lease_s` is what is left of the KV lease."""

    attempt_id: str
    lease_s: float
    kv_bytes: int
    cached_tokens: int


class Grown(NamedTuple):
    """An attempt has generated `tokens` so far, all its sequences together."""

    attempt_id: str
    tokens: int


class Progress(Wire, frozen=True):
    """The attempts that were `admitted` at their decode engine since the last Progress, and those that have `grown`."""

    admitted: list[str]
    grown: list[Grown]


class Transfer(Part, frozen=True):
    """One KV transfer that has ended, as the decode engine measured it. `seconds` leaves out the time for which a flow
    scheduler held it back; `ended_ago_s` is how long before the message it ended.
    """

    attempt_id: str
    n_bytes: int
    seconds: float
    descriptors: int
    ended_ago_s: float


class Transferred(Wire, frozen=True):
    """The KV transfers that have ended since the last message, where the router's `Fleet.wants_transfers`."""

    items: list[Transfer]


class Adopt(Wire, frozen=True):
    """An attempt under way that a new router cannot know. The ingress sends one for each decided attempt after it has
    connected to the router again.

    `engine_id` is where its KV is computed or kept, `decode_engine_id` where it decodes (the same for a colocated one),
    each with its rank. `lease_s` is what is left of the lease of a pooled one.
    """

    submit: Submit
    stage: Literal["prefilling", "pooled", "decoding"]
    engine_id: str | None
    decode_engine_id: str | None = None
    tokens: int = 0
    lease_s: float = 0.0
    kv_bytes: int = 0
    dp_rank: int | None = None
    decode_dp_rank: int | None = None


class Closed(Wire, frozen=True):
    """The attempt is over, however it ended, and the router gives back all its charges. Nothing else ends an attempt at
    the router except its own Reject. `engine_id` and `task` name the culprit of a failure and what it was doing.
    """

    attempt_id: str
    outcome: Outcome
    output_tokens: int = 0
    engine_id: str | None = None
    task: Task | None = None


class Admin(Wire, frozen=True):
    """An administrator asks the router through an ingress; `body` is JSON (`actors.router.admin`). `ask` numbers the
    questions of one connection.
    """

    ask: int
    what: Literal["policy", "set_policy", "explain", "journal"]
    body: bytes = b""


# ------------------------------------------------------------------------------------------------- router -> ingress


class RoutePrefill(Wire, frozen=True):
    """Decision: prefill the attempt on `engine_id`, on its `dp_rank` (None: the engine chooses). A `colocated` attempt
    also decodes there; the KV of any other will move.

    For an attempt that waits in the pool the decision means that its lease ends before a slot is free: release that KV
    and prefill again.
    """

    attempt_id: str
    engine_id: str
    colocated: bool
    dp_rank: int | None = None


class RouteDecode(Wire, frozen=True):
    """Decision: decode the attempt on `engine_id`, on its `dp_rank` (None: the engine chooses)."""

    attempt_id: str
    engine_id: str
    dp_rank: int | None = None


class Reject(Wire, frozen=True):
    """The router will not serve the attempt now (429: the queue is full; 503: no engine, or expired in the pool). All
    its charges are given back.
    """

    attempt_id: str
    status: int
    reason: str
    retry_after_s: float


class Fleet(Wire, frozen=True):
    """All live engines, sent at connect and at every change, with the names of the policies and the
    facts that these want. `block_tokens` asks for the hashes of prompts in blocks of that size; None asks for none.
    """

    engines: list[EngineInfo]
    prefill_policy: str
    decode_policy: str
    wants_hints: bool = False
    block_tokens: int | None = None
    wants_transfers: bool = False


class FleetStatus(Wire, frozen=True):
    """The engines' last statuses, the router's own gauges and its monotonic totals, about once a second.

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


class AdminAnswer(Wire, frozen=True):
    """The answer to question `ask`: `status` as in HTTP and a JSON body, which is {"message"} for any status above
    200.
    """

    ask: int
    status: int
    body: bytes
