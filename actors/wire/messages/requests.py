"""Ingress <-> router: the life of a request, as the ingress tells it, and the decisions about it."""

from typing import Literal

from actors.wire.messages.base import Wire
from policies.request.terms import NO_TERMS, Terms


class Submit(Wire, frozen=True):
    """An attempt asks for a prefill engine. `slots` counts the sequences it will decode (n). `terms` are what the
    client asked of the service. `age_s` is how long ago the request reached its ingress: the router subtracts it from
    its own clock to know when the request's total time is over.

    `hints` (actors.router.forecasts.Hints) come where the router's `Fleet.wants_hints`. `block_hashes` (bytes by
    `actors.wire.kv`) are of the prompt's KV blocks of `block_tokens` tokens that a prefix cache can serve; they come
    where the router's `Fleet.block_tokens`. `request_id`: the client's own x-request-id, where it sent one.
    """

    attempt_id: str
    prompt_tokens: int
    max_tokens: int
    slots: int = 1
    terms: Terms = NO_TERMS
    age_s: float = 0.0
    avoid: tuple[str, ...] = ()
    hints: bytes = b""
    block_hashes: bytes = b""
    block_tokens: int = 0
    request_id: str = ""


class Prefilled(Wire, frozen=True):
    """The prefill is done: the request enters the prompt pool. `lease_s` is what is left of the KV lease."""

    attempt_id: str
    lease_s: float
    kv_bytes: int
    cached_tokens: int


class Progress(Wire, frozen=True):
    """Batched: (attempt_id, event, value) with event "prefill" (started), "admitted", "tokens" (value = total so
    far).
    """

    items: list[tuple[str, str, int]]


class Transferred(Wire, frozen=True):
    """Batched, where the router's `Fleet.wants_transfers`: KV transfers that have ended, as the engines measured them.

    Items: (attempt_id, bytes, seconds, descriptors, seconds since it ended). Time that a flow scheduler held it is
    not in it.
    """

    items: list[tuple[str, int, float, int, float]]


class Adopt(Wire, frozen=True):
    """A request under way that a new router cannot know: sent for each decided request after a reconnect to the router.

    stage: "prefilling", "pooled" (with what is left of its lease) or "decoding"; `engine_id` is where its KV is
    computed or kept, `decode_engine_id` where it decodes (the same for a colocated one); with their ranks.
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
    """The request is over, however it ended; the router gives back all its charges. The one way out.

    outcome: "finished", "cancelled", "failed", "rejected", "expired"; `engine_id` is the culprit of a failure.
    """

    attempt_id: str
    outcome: str
    output_tokens: int = 0
    engine_id: str | None = None
    stage: str | None = None


class RoutePrefill(Wire, frozen=True):
    """Decision: run `attempt_id` on `engine_id`, on its `dp_rank` (None: the engine chooses). mode: "prefill" (KV
    will move) or "colocated" (prefill and decode there).

    For a request that waits in the pool it means: its lease ends before a slot is free; release that KV, prefill again.
    """

    attempt_id: str
    engine_id: str
    mode: Literal["prefill", "colocated"]
    dp_rank: int | None = None


class RouteDecode(Wire, frozen=True):
    """Decision: decode `attempt_id` on `engine_id`, there on `dp_rank` (None: the engine's choice)."""

    attempt_id: str
    engine_id: str
    dp_rank: int | None = None


class Reject(Wire, frozen=True):
    """The router will not (429: queue full; 503: no engine, expired in pool) serve `attempt_id` now. All charges are
    given back.
    """

    attempt_id: str
    status: int
    reason: str
    retry_after_s: float
