"""Views: all that a policy may read, as records. `ClusterState.snapshot` builds them; snapshots share equal parts."""

import math
from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import NamedTuple, Protocol

from policies.network.oracle import Oracle
from policies.record import record
from policies.request.terms import NO_TERMS, Terms

WorkerId = str
RequestId = str


class Role(StrEnum):
    """A worker's role. Colocated workers prefill and decode the same request; the others move KV between them."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class Health(StrEnum):
    """A worker's health. Only READY workers get new work. DRAINING workers finish the work that they have, and so do
    WARM ones, which are well and kept without traffic until somebody activates them.

    STALLED workers have work and end no step, and DOWN workers cannot work any more; both by their own report.
    """

    READY = "ready"
    WARM = "warm"
    STALLED = "stalled"
    DRAINING = "draining"
    DOWN = "down"


@record
class Request:
    """An attempt as it arrives at the router. `slots` counts the sequences that it will decode (OpenAI's n), and
    `terms` are what the client asked of the service.

    `deadline_s` is the time on the snapshot's clock at which the whole request must have ended (`Terms.deadline_s`).
    `avoid` names workers that are passed over if there are others, because an earlier attempt failed there.
    `block_hashes` are the chained hashes of the prompt's full KV blocks of `block_tokens` tokens, as the engines' KV
    events name them; they are empty where they are not known. `predicted_tokens` is the length predictor's expected
    output of one sequence. The client waits for its next token since `waits_since_s`, which an earlier attempt may have
    begun (`Life.waits_since_s`; None: since this one arrived). `again` says that an earlier attempt of the request
    was served, at least in part.
    """

    attempt_id: RequestId
    arrived_s: float
    prompt_tokens: int
    max_tokens: int
    slots: int = 1
    terms: Terms = NO_TERMS
    deadline_s: float = float("inf")
    avoid: tuple[WorkerId, ...] = ()
    block_hashes: tuple[int, ...] = ()
    block_tokens: int = 0
    predicted_tokens: float | None = None
    waits_since_s: float | None = None
    again: bool = False

    @property
    def ttft_from_s(self) -> float:
        """The time from which the TTFT objective counts: a retry gets no new one."""
        return self.arrived_s if self.waits_since_s is None else self.waits_since_s


# ASSUMPTION: a lease that is renewed is renewed for the first time when a third of it has passed
# (`policies.request.life.ASKS_PER_LEASE`); then one answer has failed to come in time.
OVERDUE_SHARE = 2.0 / 3.0
"""The share of a lease after which its pool entry is overdue if the lease has not been renewed. The same share of a
TTFT objective has passed when a first token is about to miss it.
"""


@record
class PoolEntry:
    """A finished prefill that waits for a decode worker. Its KV stays on `prefill_worker` until `lease_until_s`, which
    its ingress puts off as long as the entry waits and the engine agrees; it last did so at `renewed_s` (None: never).
    The lease was granted for `lease_s` seconds at first (None: it was never renewed, so its end says so). An entry is
    `leaving` if its prefill worker drains, because the KV goes with the worker.
    """

    request: Request
    prefill_worker: WorkerId
    group: str
    entered_s: float
    lease_until_s: float
    kv_bytes: int
    cached_tokens: int
    renewed_s: float | None = None
    lease_s: float | None = None
    leaving: bool = False
    overdue_from_s: float = field(init=False)
    """Time from which the entry is overdue: `OVERDUE_SHARE` of its lease has passed without a renewal, so that the
    lease is about to end.
    """
    starves_from_s: float = field(init=False)
    """Time from which an entry that fits nowhere starves: `OVERDUE_SHARE` of the lease as it was granted has passed,
    whether it was renewed since or not.
    """
    slo_from_s: float = field(init=False)
    """Time from which the first token is about to miss its TTFT objective; infinity without an objective that counts
    against others (`Terms.slo_presses`).
    """
    slo_until_s: float = field(init=False)
    """Time at which that objective is missed."""

    def __post_init__(self) -> None:
        lease_s = self.lease_until_s - self.entered_s if self.lease_s is None else self.lease_s
        since_s = self.entered_s if self.renewed_s is None else self.renewed_s
        overdue_from_s = since_s + OVERDUE_SHARE * (self.lease_until_s - since_s)
        terms, from_s = self.request.terms, self.request.ttft_from_s
        slo_s = math.inf if terms.ttft_slo_s is None or not terms.slo_presses else terms.ttft_slo_s
        object.__setattr__(self, "lease_s", lease_s)
        object.__setattr__(self, "overdue_from_s", overdue_from_s)
        object.__setattr__(self, "starves_from_s", self.entered_s + OVERDUE_SHARE * lease_s)
        object.__setattr__(self, "slo_from_s", from_s + OVERDUE_SHARE * slo_s)
        object.__setattr__(self, "slo_until_s", from_s + slo_s)

    def is_overdue(self, now_s: float) -> bool:
        """Whether the entry goes before all others, whatever its class: its prefill worker drains, or its lease is
        about to end. Its KV would be lost otherwise.
        """
        return self.leaving or self.overdue_from_s < now_s

    def is_pressing(self, now_s: float) -> bool:
        """Whether the entry goes before the others of its class: its first token is about to miss its TTFT objective.
        One that has missed it gains nothing by going first.
        """
        return self.slo_from_s < now_s <= self.slo_until_s


@record
class TypicalEntry:
    """Moving means over about the last `pool.TYPICAL_OF` pool entries.

    `output_tokens` is the mean predicted output of one sequence, over the entries that had a prediction (None: no entry
    had a prediction).
    """

    kv_bytes: float
    output_tokens: float | None = None


class Departure(NamedTuple):
    """The number of sequences that are forecast to finish `step` decode steps from now (>= 1), and the KV tokens that
    they hold now.
    """

    step: int
    sequences: int
    kv_tokens: int


class Transfers(NamedTuple):
    """The number `flows` of KV transfers in flight from one prefill worker to worker `to`, for requests of one
    `priority`.
    """

    to: WorkerId
    priority: int
    flows: int


@record
class Queues:
    """Lengths of an engine's queues in requests. None: the engine does not report it."""

    running: float = 0.0
    waiting: float = 0.0
    swapped: float | None = None


@record
class Indicators:
    """FlowKV's node status: means over a sliding window of the engine's reports. None: the engine does not report it.

    `running`, `waiting`, `swapped` and `sending` are queue lengths in requests. The other fields are shares in use,
    0..1, of the step's token budget, of compute and of memory bandwidth. `prefill` is the part of the first three
    queues whose prompts are still to be computed; the rest of them decodes, or waits to. All of `sending` is prefill's.
    """

    running: float
    waiting: float
    swapped: float | None = None
    sending: float | None = None
    token_budget: float | None = None
    compute: float | None = None
    memory_bandwidth: float | None = None
    prefill: Queues = Queues()


class Quarantine(NamedTuple):
    """The quarantine of a worker that fails or is slow: it gets no new work, from `probe_at_s` on except one probe at a
    time. `reason` is "failing" or a value of `standing.Figure`.
    """

    reason: str
    since_s: float
    probe_at_s: float


@record
class Worker:
    """One worker as the router sees it: its facts, the router's charges to it, and the engine's last report.

    `kv_tokens` are the KV tokens of the requests that the router charged to it (L_g of BalanceRoute for a decode
    worker). `shared_kv_tokens` of them are in KV blocks that a request shares with another of them: they are read for
    each request, but kept in memory once. `foreign_kv_tokens` are KV tokens in use beyond all these, by the engine's
    last report. `status_at_s` is None until the first report. `slots` is BalanceRoute's beta_max, `slots_used` its
    beta; it may be above `slots`, and the rest then queues in the engine.

    `barrier` names the worker's barrier group, whose workers end every decode step together ("": it is in none).
    `sending` counts the finished prefills whose KV the worker still holds; `transfers` counts the transfers among them
    that are in flight. `departures` are the forecasts for a decode worker's sequences, by step; a sequence without a
    forecast is expected to stay. `unreported` counts the requests routed to the worker since its last report, and
    `unreported_prefills` those of them that were routed there to be prefilled.
    `quarantine` is None while the router finds no fault with the worker.
    """

    id: WorkerId
    role: Role
    group: str
    node: str
    health: Health
    slots: int
    kv_capacity_tokens: int
    prefilling: int = 0
    prefilling_tokens: int = 0
    slots_used: int = 0
    kv_tokens: int = 0
    foreign_kv_tokens: int = 0
    engine_running: int | None = None
    engine_waiting: int | None = None
    status_at_s: float | None = None
    barrier: str = ""
    sending: int = 0
    transfers: tuple[Transfers, ...] = ()
    departures: tuple[Departure, ...] = ()
    indicators: Indicators | None = None
    unreported: int = 0
    quarantine: Quarantine | None = None
    shared_kv_tokens: int = 0
    unreported_prefills: int = 0

    @property
    def free_slots(self) -> int:
        return max(0, self.slots - self.slots_used)

    @property
    def kv_tokens_in_use(self) -> int:
        """KV tokens in memory that cannot be evicted: each copy of a block once, foreign ones included."""
        return self.kv_tokens - self.shared_kv_tokens + self.foreign_kv_tokens

    @property
    def free_kv_tokens(self) -> int:
        return max(0, self.kv_capacity_tokens - self.kv_tokens_in_use)

    @property
    def kv_usage(self) -> float:
        """Share of KV tokens in use, 0..1."""
        return min(1.0, self.kv_tokens_in_use / self.kv_capacity_tokens)


class PortBand(NamedTuple):
    """Flows of KV that stand next to one another in the order in which a flow agent serves a port: their priority
    `level` (1 is the highest), the `key` of the last of them within it, the number of `flows`, and the bytes of theirs
    that have not arrived, `size` (`policies.flow.ahead`).
    """

    level: int
    key: tuple[float, ...]
    flows: int
    size: int


class PortLoad(NamedTuple):
    """The flows that move through one direction of a node's link, or wait for it: `bands` in the order in which they
    are served, and the bandwidth that the port gives them (None: nobody knows it yet).
    """

    bytes_per_s: float | None
    bands: tuple[PortBand, ...] = ()


class NodeLoad(NamedTuple):
    """The loads of a node's two ports, as its flow agent knows them."""

    node: str
    egress: PortLoad
    ingress: PortLoad


class PrefixHits(Protocol):
    """A source of prefix cache hits: which workers hold the head of a request's prompt in their KV cache.

    A cached block may be idle: no request uses it, and the engine may evict it. Idle blocks count as free KV, so a hit
    on them saves the transfer but no memory. A hit on blocks in use saves both.
    """

    def tokens(self, request: Request) -> Mapping[WorkerId, int]:
        """Returns the tokens at the prompt's head that are cached, by worker (block-aligned, at most `prompt_tokens`).

        Workers that hold none are left out.
        """
        ...

    def may_be_cached(self, request: Request, tokens: int) -> bool:
        """Whether some worker may cache the first `tokens` (>= 1) tokens of the prompt. Only False is certain; the
        answer costs less than a lookup.
        """
        ...

    def tokens_in_use(self, request: Request, at_least: int = 1) -> Mapping[WorkerId, int]:
        """Returns of `tokens` those in blocks that requests of the worker use already, by worker: the request would
        need no free KV for them. Workers with fewer than `at_least` (>= 1) are left out.
        """
        ...

    def tokens_in_use_on(self, worker: WorkerId, request: Request) -> int:
        """Returns `tokens_in_use` of one worker."""
        ...


@record
class KnownHits:
    """Prefix cache hits from literal tables by request and worker: `by_request` those in all, `in_use` those in blocks
    in use. An empty table: nothing is cached anywhere.
    """

    by_request: Mapping[RequestId, Mapping[WorkerId, int]] = field(default_factory=dict)
    in_use: Mapping[RequestId, Mapping[WorkerId, int]] = field(default_factory=dict)

    def tokens(self, request: Request) -> Mapping[WorkerId, int]:
        return self.by_request.get(request.attempt_id, {})

    def may_be_cached(self, request: Request, tokens: int) -> bool:
        return request.attempt_id in self.by_request or request.attempt_id in self.in_use

    def tokens_in_use(self, request: Request, at_least: int = 1) -> Mapping[WorkerId, int]:
        known = self.in_use.get(request.attempt_id, {})
        return {worker: tokens for worker, tokens in known.items() if tokens >= at_least}

    def tokens_in_use_on(self, worker: WorkerId, request: Request) -> int:
        return self.in_use.get(request.attempt_id, {}).get(worker, 0)


NO_HITS = KnownHits()


@record
class Snapshot:
    """The cluster at `now_s`.

    The order of `workers` means nothing; policies sort by id. `pool` holds the waiting entries that the decision is
    about, in the order in which they should be served. `last_chosen` names the worker chosen last for each task
    ("prefill", "decode"), for policies that choose workers in turn. `oracle` is the network's cost oracle (None: the
    network is not known). `hits` says where prompts are cached. `typical` describes recent pool entries (None: there
    were none). `overcommit_slots` is the number of sequences that a decode worker may get beyond its slots.
    `overdue_by_slo` says whether entries go first in their class by their TTFT objectives (`PoolEntry.is_pressing`).
    `usual_output_tokens` are the output tokens that the workers generate for each sequence that ends, of late (None:
    none has ended).
    """

    now_s: float
    workers: Mapping[WorkerId, Worker]
    pool: tuple[PoolEntry, ...]
    last_chosen: Mapping[str, WorkerId]
    oracle: Oracle | None = None
    hits: PrefixHits = NO_HITS
    typical: TypicalEntry | None = None
    overcommit_slots: int = 0
    usual_output_tokens: float | None = None
    overdue_by_slo: bool = False
