"""Engine <-> router: an engine's facts, its counts, and the content of its prefix cache.

Sim engine <-> sim engine: a decode engine reads the KV that a prefill engine holds.
"""

from typing import Literal

import msgspec

from actors.wire.messages.base import EngineState, Part, Role, Wire

KV_EVENTS = "kv_events"
"""Name of the feature of an engine that reports the content of its prefix cache to the router."""


class EngineInfo(Part, frozen=True):
    """The facts that an engine announces once. The router passes them on to every ingress.

    `kind` is a name of `actors.engine.registry.ENGINES`. `group` is NIXL's compatibility group (engine version, model,
    layout, dtype): KV never crosses groups. `slots` is beta_max, the most sequences that decode at once. `addresses`
    are tried in order (`unix:/path`, `tcp:host:port`). `node` is Ray's id of the engine's node, or the name in its
    group's `topology`; `labels` say where that node is (`actors.engine.topology`).

    An engine of `dp_ranks` data-parallel ranks has one scheduler for each rank, with an equal share of `slots` and
    `kv_blocks`. With a `barrier` all ranks end every step together.
    """

    id: str
    role: Role
    kind: str
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
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    dp_ranks: int = 1
    barrier: bool = False


class Announce(Wire, frozen=True):
    """Engine -> router: the engine exists. It is sent again after a reconnect and when `state` changes."""

    info: EngineInfo


class Status(Wire, frozen=True):
    """Engine -> router, periodically: the engine's own counts. A figure that the engine does not know is None, never 0.

    `swapped` requests and the shares in use, 0..1, of the step's token budget, of compute and of memory bandwidth are
    FlowKV's indicators. An engine of several ranks counts all of them together, and each one in `ranks`.
    """

    engine_id: str
    running: int
    waiting: int
    kv_blocks_used: int
    leases: int
    kv_usage: float
    state: EngineState = "ready"
    tokens_in_flight: int | None = None
    totals: dict[str, float] = msgspec.field(default_factory=dict)
    swapped: int | None = None
    token_budget: float | None = None
    compute: float | None = None
    memory_bandwidth: float | None = None
    ranks: "list[Status]" = msgspec.field(default_factory=list)


# ------------------------------------------------------------------------------------------------------ prefix cache


class KvChange(Part, frozen=True):
    """One change of a prefix cache (`policies.engine_model.blocks.Change`).

    `hashes` are bytes by `actors.wire.kv`. `parent` is the hash before the first stored block, None at the start of a
    prompt.
    """

    kind: Literal["stored", "removed", "cleared"]
    hashes: bytes = b""
    parent: int | None = None


class KvEvents(Wire, frozen=True):
    """Engine -> router: batch `seq` of the changes of one rank's prefix cache, numbered from 0 in each `epoch` (one
    life of the engine). An engine sends batches within a report period, from the first KvReplay of a connection until
    KvStop.
    """

    engine_id: str
    epoch: str
    seq: int
    changes: list[KvChange]
    rank: int = 0


class KvReplay(Wire, frozen=True):
    """Router -> engine: send batches `first`..`last` of `epoch` again (`last` None: up to now), and all that follow.
    The engine answers with KvEvents, or with KvState where it does not have them any more, the epoch is another one,
    or `first` is None.
    """

    epoch: str
    first: int | None
    last: int | None = None
    rank: int = 0


class KvStop(Wire, frozen=True):
    """Router -> engine: no policy reads prefix hits any more; send no more KvEvents of `rank`."""

    rank: int = 0


class KvState(Wire, frozen=True):
    """Engine -> router: part `part` of `parts` of all that a rank's prefix cache holds before batch `next_seq`, as
    chains: KvChange of kind "stored", each chain after the chain that it continues.
    """

    engine_id: str
    epoch: str
    next_seq: int
    part: int
    parts: int
    chains: list[KvChange]
    rank: int = 0


# ----------------------------------------------------------------------------------------- sim engine <-> sim engine


class Pull(Wire, frozen=True):
    """Sim decode engine -> sim prefill engine: the sender starts to read `n_bytes` of the KV of `attempt_id`; keep it
    until Pulled.
    """

    attempt_id: str
    n_bytes: int = 0


class PullGrant(Wire, frozen=True):
    """Answer to Pull. `ok` is False where the KV is gone (lease expired, released, engine restarted). With `paced` a
    Sent follows when the bytes have arrived; without it the reader computes how long they take.
    """

    attempt_id: str
    ok: bool
    kv_bytes: int = 0
    paced: bool = False


class Sent(Wire, frozen=True):
    """Sim prefill engine -> sim decode engine: the bytes of a paced Pull have arrived, after `seconds`."""

    attempt_id: str
    seconds: float


class Pulled(Wire, frozen=True):
    """The read has ended; the prefill engine frees its copy."""

    attempt_id: str
