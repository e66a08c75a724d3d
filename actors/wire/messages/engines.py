"""Engine -> router: what an engine is and what it counts. The router passes both on to the ingresses (`Fleet`)."""

import msgspec

from actors.wire.messages.base import EngineState, Role, Wire

KV_EVENTS = "kv_events"
"""The feature of an engine that tells the router what its prefix cache holds."""


class EngineInfo(Wire, frozen=True):
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
    kind: str  # a name of actors.engine.registry.ENGINES
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
    """Engine -> router: I exist (also sent again after a reconnect, and when `state` changes)."""

    info: EngineInfo


class Status(Wire, frozen=True):
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
    totals: dict[str, float] = msgspec.field(default_factory=dict)
    swapped: int | None = None
    token_budget: float | None = None
    compute: float | None = None
    memory_bandwidth: float | None = None
    ranks: "list[Status]" = msgspec.field(default_factory=list)
