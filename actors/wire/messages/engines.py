"""Messages between engine and router: the facts about an engine, its counts, and the content of its prefix cache.

Messages between two sim engines, by which a decode engine reads the KV that a prefill engine holds.
"""

from typing import Literal

import msgspec

from actors.wire.messages.base import Count, Duty, EngineState, Part, Role, Wire
from actors.wire.messages.weights import WeightsRead
from policies.engine_model.leases import MAX_LEASE_S

KV_EVENTS = "kv_events"
"""Name of the feature of engines that report the content of their prefix cache to the router."""


class Started(Part, frozen=True):
    """How an engine's start was spent, in four of the five steps of `policies.scaling.starts`, in seconds. Its process
    began with them at `began_s` (Unix time of its node); the step before, `reserve`, is known to Serve only.
    `announce_s` is None until the engine has announced itself. `weights` says where the weights came from, where that
    could be another engine.
    """

    began_s: float
    process_s: float
    weights_s: float
    post_load_s: float
    announce_s: float | None = None
    weights: WeightsRead | None = None


class EngineInfo(Part, frozen=True):
    """The facts about itself that an engine announces. The router passes them on to every ingress.

    `kind` is a name of `actors.engine.registry.ENGINES`. `group` is NIXL's compatibility group (engine version, model,
    layout, dtype): KV never crosses groups. `slots` is beta_max, the most sequences that decode at once. A peer tries
    `addresses` in order (`unix:/path`, `tcp:host:port`). `node` is Ray's id of the engine's node, or the name in its
    group's `topology`. `labels` say where in the network that node is (`actors.engine.topology`).

    An engine of `dp_ranks` data-parallel ranks has one scheduler for each rank, with an equal share of `slots` and
    `kv_blocks`. With a `barrier` all ranks end every step together.

    The KV of a finished prefill is held for `lease_s`, and with renewals for `max_lease_s` at most.

    `home_role` is the role that the engine had before, if it was lent to another `role` for a time (SetRole). `duty`
    says whether it gets requests. `started` says how its start was spent. By `kv_peer`, opaque bytes, an engine of the
    same group can make the acquaintance of this one before it reads KV from it (Peers); empty: it needs none. At
    `weights` it lends its weights to engines that start (FindWeights).
    """

    id: str
    role: Role
    kind: str
    model: str
    group: str
    addresses: tuple[str, ...]
    slots: Count
    kv_blocks: Count
    block_size_tokens: Count
    max_model_len: Count
    node: str
    pid: int
    lease_s: float
    state: EngineState = "ready"
    features: tuple[str, ...] = ()
    replica: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    dp_ranks: Count = 1
    barrier: bool = False
    max_lease_s: float = MAX_LEASE_S
    home_role: Role | None = None
    duty: Duty = "active"
    started: Started | None = None
    kv_peer: bytes = b""
    weights: tuple[str, ...] = ()


class Announce(Wire, frozen=True):
    """Engine -> router: the facts about this engine, sent after each connect and when its state, role or duty changes.
    The engine has had its duty for `duty_for_s` seconds. It became ready, was activated, or changed its role last
    `active_for_s` seconds ago.
    """

    info: EngineInfo
    duty_for_s: float = 0.0
    active_for_s: float = 0.0


class SetRole(Wire, frozen=True):
    """Router -> engine: serve `role` with this `duty` from now on. The engine keeps both until the next such order, and
    announces itself with them. What it computes and holds then ends where it is.

    An engine that is `lent` is to come back to its former role, which it announces as its `home_role`; otherwise the
    new role is for good.
    """

    role: Role
    duty: Duty = "active"
    lent: bool = False


class Peers(Wire, frozen=True):
    """Router -> engine: engines from which this one may come to read KV, by their `kv_peer`. It makes their
    acquaintance in the background, so that no request waits for it. Sent when there are others than before.
    """

    peers: tuple[bytes, ...]


class Status(Wire, frozen=True):
    """Engine -> router, periodically: the engine's own counts. A figure that the engine does not know is None, never 0.

    FlowKV's indicators are the number of `swapped` requests and three shares in use, each 0..1: `token_budget` of the
    step, `compute`, and `memory_bandwidth`. An engine of several ranks counts all of them together, and each rank in
    `ranks`.
    """

    engine_id: str
    running: Count
    waiting: Count
    kv_blocks_used: Count
    leases: Count
    kv_usage: float
    state: EngineState = "ready"
    tokens_in_flight: Count | None = None
    totals: dict[str, float] = msgspec.field(default_factory=dict)
    swapped: Count | None = None
    token_budget: float | None = None
    compute: float | None = None
    memory_bandwidth: float | None = None
    ranks: "list[Status]" = msgspec.field(default_factory=list)


# ------------------------------------------------------------------------------------------------------ prefix cache


class KvChange(Part, frozen=True):
    """One change of a prefix cache (`policies.engine_model.blocks.Change`).

    `hashes` are packed by `actors.wire.kv`. `parent` is the hash of the block before the first stored one, or None at
    the start of a prompt.
    """

    kind: Literal["stored", "removed", "cleared"]
    hashes: bytes = b""
    parent: int | None = None


class KvEvents(Wire, frozen=True):
    """Engine -> router: batch `seq` of the changes of one rank's prefix cache. Batches are numbered from 0 in each
    `epoch`, which is one life of the engine. An engine sends a batch within a report period of the change, from the
    first KvReplay of a connection until KvStop.
    """

    engine_id: str
    epoch: str
    seq: int
    changes: list[KvChange]
    rank: int = 0


class KvReplay(Wire, frozen=True):
    """Router -> engine: send batches `first`..`last` of `epoch` again (`last` None: up to the present), and all later
    ones. The engine answers with KvEvents. It answers with KvState instead if it no longer keeps these batches, if its
    epoch is another one, or if `first` is None.
    """

    epoch: str
    first: int | None
    last: int | None = None
    rank: int = 0


class KvStop(Wire, frozen=True):
    """Router -> engine: send no more KvEvents of `rank`, because no policy reads prefix hits any more."""

    rank: int = 0


class KvState(Wire, frozen=True):
    """Engine -> router: part `part` (from 0) of the `parts` of a snapshot of one rank's prefix cache, taken before
    batch `next_seq`. `chains` are KvChanges of kind "stored", each after the chain that it continues.
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
    """Sim decode engine -> sim prefill engine: the sender starts to read `n_bytes` of the attempt's KV, which the
    receiver keeps until Pulled. If `chunked`, the bytes do not move yet: a PullChunk asks for each part of them.
    """

    attempt_id: str
    n_bytes: int = 0
    chunked: bool = False


class PullChunk(Wire, frozen=True):
    """Sim decode engine -> sim prefill engine: `n_bytes` of a chunked Pull whose grant was `paced` move now, as part
    number `chunk`.
    """

    attempt_id: str
    chunk: int
    n_bytes: int


class PullGrant(Wire, frozen=True):
    """Sim prefill engine -> sim decode engine: the answer to Pull. `ok` is False if the KV is gone (lease expired,
    released, engine restarted) or is already being read over this connection. If `paced`, a Sent follows when the bytes
    have arrived; otherwise the reader computes how long they take.
    """

    attempt_id: str
    ok: bool
    kv_bytes: int = 0
    paced: bool = False


class Sent(Wire, frozen=True):
    """Sim prefill engine -> sim decode engine: the bytes of a paced Pull, or of part `chunk` of it, have arrived, after
    `seconds`.
    """

    attempt_id: str
    seconds: float
    chunk: int = 0


class Pulled(Wire, frozen=True):
    """Sim decode engine -> sim prefill engine: the read has ended, and the prefill engine frees its copy."""

    attempt_id: str
