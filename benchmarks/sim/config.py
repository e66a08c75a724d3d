"""The configuration of a simulation: engines, control plane, predictor, network and the time that is measured.

Each part checks its values when it is constructed, and raises a ValueError that names the wrong one.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

from benchmarks.sim.fleet_setup import FleetSetup
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.links import KvNetwork
from policies.admission.registry import OPEN
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.leases import MAX_LEASE_S
from policies.engine_model.timing import TimingProfile
from policies.network.oracle import Oracle
from policies.routing.flowkv.regimes import RegimeThresholds
from policies.routing.flowkv.role_switch import RoleSwitchConfig
from policies.state.views import Role
from predictors.forecast import ForecastConfig
from predictors.protocol import Outcome, Predictor


def _require(who: str, checks: list[tuple[bool, str]]) -> None:
    for ok, message in checks:
        if not ok:
            raise ValueError(f"{who}: {message}")


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The plan of a prefill in `groups` groups of layers, which take equal compute time.

    After each group its collective runs (if it has bytes). Then the group's share of the KV may leave the worker, and
    the next group computes. The request is offered to the dispatcher after the first group.

    A collective (MFS stage 2) is a flow of `priority` from the worker's node to `peer_node` ("" is the worker's own
    node). It has `collective_bytes_per_token` bytes for each prompt token and group. Where a flow policy is configured
    (`SimConfig.flows`) and the engine spans several nodes (`EngineSpec.spans`), it is an all-to-all between these: the
    bytes are divided evenly, `pairs` sends one flow from each node to each other, and `ring` one flow from each node to
    the next, with the weight of the flows that it stands for. Both load every port alike. An `isolated` collective has
    ports of its own, with the bandwidth of the engine's profile, so that nothing else delays it.
    """

    groups: int
    collective_bytes_per_token: float = 0.0
    peer_node: str = ""
    priority: int = 0
    pattern: Literal["pairs", "ring"] = "pairs"
    isolated: bool = False

    def __post_init__(self) -> None:
        _require(
            "LayerPlan",
            [
                (self.groups >= 1, f"groups is {self.groups}: must be >= 1"),
                (self.collective_bytes_per_token >= 0, "collective_bytes_per_token must be >= 0"),
            ],
        )


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """`count` equal engines, named `name`-0, `name`-1, and so on.

    - `nodes` has the node of each engine; where it is empty, each engine has a node of its own, with the engine's name.
    - `nics` has the number of each engine's NIC on its node; where it is empty, each flow draws one.
    - `spans` has all nodes of each engine, the engine's own first; where it is empty, each engine has one node.
    - `barrier` is a name; the workers that share it (not empty) end every step together.
    - `kv_blocks` is the number of KV blocks, each of `block_size_tokens` tokens.
    - Without `prefix_cache` no prompt block is shared or reported.
    - `preempted` is where a preempted request queues again: at its engine (as in vLLM) or at the router.
    - `transfer_flows` is the number of parallel flows of one KV transfer into an engine.
    - The KV of a finished prefill is held for `lease_s`, and with renewals for `max_lease_s` at most; if that is
      not longer, no lease is renewed.
    - Without `prefill_queue` a prefill engine computes all prompts at once (`unlimited`).
    - `receive_ahead` KV transfers into an engine may begin while all of its slots are taken (BalanceRoute D.6).
    """

    name: str
    role: Role
    count: int
    profile: TimingProfile
    slots: int = 256
    kv_blocks: int = 32_768
    block_size_tokens: int = 16
    prefill_budget_tokens: int = 8_192
    chunked_prefill: bool = True
    prefix_cache: bool = True
    lease_s: float = 30.0
    max_lease_s: float = MAX_LEASE_S
    group: str = "g"
    barrier: str = ""
    nodes: tuple[str, ...] = ()
    nics: tuple[int, ...] = ()
    spans: tuple[tuple[str, ...], ...] = ()
    preempted: Literal["engine", "router"] = "engine"
    transfer_flows: int = 1
    layers: LayerPlan | None = None
    prefill_queue: bool = True
    receive_ahead: int = 0

    def __post_init__(self) -> None:
        who = f"engines {self.name!r}"
        ones = ("count", "slots", "kv_blocks", "block_size_tokens", "prefill_budget_tokens", "transfer_flows")
        _require(
            who,
            [(getattr(self, key) >= 1, f"{key} is {getattr(self, key)}: must be >= 1") for key in ones]
            + [
                (self.lease_s > 0, f"lease_s is {self.lease_s}: must be > 0"),
                (self.receive_ahead >= 0, f"receive_ahead is {self.receive_ahead}: must be >= 0"),
                (self.max_lease_s > 0, f"max_lease_s is {self.max_lease_s}: must be > 0"),
                (
                    not self.nodes or len(self.nodes) == self.count,
                    f"{len(self.nodes)} nodes for {self.count} engines: give one each, or none",
                ),
                (
                    not self.nics or len(self.nics) == self.count,
                    f"{len(self.nics)} nics for {self.count} engines: give one each, or none",
                ),
                (
                    not self.spans or [span[:1] for span in self.spans] == [(node,) for node in self.nodes],
                    "spans: give each engine its nodes, of which the first is its own in `nodes`",
                ),
                (
                    self.layers is None or self.role is Role.PREFILL,
                    "layers are for engines of role prefill",
                ),
                (
                    self.layers is None or not self.barrier,
                    "layers and a barrier exclude each other",
                ),
                (
                    self.prefill_queue
                    or (self.role is Role.PREFILL and self.layers is None and not self.barrier),
                    "prefill_queue False is for engines of role prefill, without layers and barrier",
                ),
            ],
        )

    def workers(self) -> list[tuple[str, str, int | None]]:
        """Returns (name, node, NIC) of each engine; a NIC of None is drawn for each flow."""
        names = [f"{self.name}-{i}" for i in range(self.count)]
        nics = self.nics or (None,) * self.count
        return list(zip(names, self.nodes or names, nics, strict=True))

    def span_of(self, number: int) -> tuple[str, ...]:
        """Returns the nodes of the engine `number` (from 0)."""
        return self.spans[number] if self.spans else (self.workers()[number][1],)


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Latencies and rules of ingress and router. The periods are those of the live system.

    A message between two processes takes `hop_s`. For each of its two tasks a request crosses ingress -> router ->
    ingress -> engine. `ingress_s` is the time of a request's HTTP side, both ways together. With a request's ten hops
    it adds up to the added TTFT that the overhead benchmark measured at concurrency 1 (`overhead/overhead-sim.json`).
    """

    # docs/design.md, section 8: a request and its reply take 0.15 ms over a framed socket.
    hop_s: float = 75e-6
    # ASSUMPTION: the rest of the measured 2.3 ms, less ten hops.
    ingress_s: float = 1.55e-3
    status_s: float = 0.1
    status_always_s: float = 1.0
    tick_s: float = 0.2
    progress_s: float = 0.02
    forecast_s: float = 0.05
    flows_s: float = 1.0
    kv_events: bool = True
    max_retries: int = 2
    lease_margin_s: float = 2.0
    request_timeout_s: float = 600.0
    # as `IngressConfig`
    prefill_limit_s: float = 300.0
    transfer_limit_s: float = 120.0

    def __post_init__(self) -> None:
        zero = ("hop_s", "ingress_s", "max_retries", "lease_margin_s")
        above = (
            "status_s", "status_always_s", "tick_s", "progress_s", "forecast_s", "flows_s", "request_timeout_s",
            "prefill_limit_s", "transfer_limit_s",
        )  # fmt: skip
        _require(
            "control plane",
            [(getattr(self, k) >= 0, f"{k} is {getattr(self, k)}: must be >= 0") for k in zero]
            + [(getattr(self, k) > 0, f"{k} is {getattr(self, k)}: must be > 0") for k in above],
        )


IDEAL = ControlPlane(hop_s=0.0, ingress_s=0.0)
"""A control plane whose messages take no time, as in the papers' simulators."""


class ForecastSource(Protocol):
    """A function that makes a new predictor for each run, because a predictor learns while it runs.

    `lengths` are the true output lengths in tokens by request id.
    """

    def __call__(self, lengths: Mapping[str, int]) -> Predictor: ...


@dataclass(frozen=True, slots=True)
class Forecasting:
    """The predictor in the simulated router. `states` has the settings of the live router (k, gate and floor).

    Forecasts are made for the decode policy's `horizon`, as in the live router; `window_tokens` is H while that policy
    has none.

    `source` makes the predictor. `total_at_arrival` says whether total lengths are forecast at arrival; None means only
    while the policies need them. `history` has the outcomes from which predictor and features learn before the run, in
    order of time; their times lie before the run's 0.
    """

    source: ForecastSource
    # ASSUMPTION: the window is the default of the live router.
    window_tokens: int = 48
    states: ForecastConfig = field(default_factory=ForecastConfig)
    total_at_arrival: bool | None = None
    history: tuple[Outcome, ...] = ()


class NetworkSetup(Protocol):
    """The interface of what builds a run's network (`network.fabric.Fabric`).

    `oracle_s` is the oracle's period in seconds, or None where there is no oracle.
    """

    @property
    def oracle_s(self) -> float | None: ...

    def build(self, kernel: Kernel, seed: int) -> tuple[KvNetwork, Callable[[float], Oracle | None]]:
        """Returns the network, which runs on `kernel`, and a function from a time (s) to the oracle's view of it."""
        ...


NO_PARAMS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RoleSwitching:
    """FlowKV's role switch in the simulated router, which looks once every `every_s` as the live router does."""

    switch: RoleSwitchConfig
    thresholds: RegimeThresholds = field(default_factory=RegimeThresholds)
    every_s: float = 1.0

    def __post_init__(self) -> None:
        _require("role switching", [(self.every_s > 0, f"every_s is {self.every_s}: must be > 0")])


@dataclass(frozen=True, slots=True)
class Permits:
    """Flows by permit, as in the live system: chunks that take `chunk_s` seconds at the port's rate, of which at most
    `window` are posted at a port. The message of a permit, and that of a chunk's end, take `delay_s` each. With
    `whole_reads`, one permit covers all that is left of a flow while its ports have no other, up to `whole_at_most_s`
    seconds at the port's rate (None: any). With `collectives`, those wait for permits, too. The defaults are the live
    ones (`policies.flow.config`), but for collectives, which live engines do not let wait.
    """

    chunk_s: float = 0.010
    window: int = 2
    delay_s: float = 0.0
    whole_reads: bool = True
    whole_at_most_s: float | None = 0.030
    collectives: bool = True

    def __post_init__(self) -> None:
        _require(
            "Permits",
            [
                (self.chunk_s > 0, f"chunk_s is {self.chunk_s}: must be > 0"),
                (self.window >= 1, f"window is {self.window}: must be >= 1"),
                (self.delay_s >= 0, f"delay_s is {self.delay_s}: must be >= 0"),
                (
                    self.whole_at_most_s is None or self.whole_at_most_s > 0,
                    f"whole_at_most_s is {self.whole_at_most_s}: must be > 0 or None",
                ),
            ],
        )


@dataclass(frozen=True, slots=True)
class FlowSetup:
    """The scheduling of a simulation's flows by a policy of `policies.flow` (MFS), on a configured network.

    `policy` is a pair (name, parameters). Its levels are those of ideal switches, which serve levels strictly and share
    each fairly; with `permits` the live arbiter posts chunks instead. Levels are computed again every `promote_s`
    seconds while flows wait, and at each start or end of a flow.

    With `reuse`, prefill engines with layers read the longest prefix that any of them has computed (MFS stage 1) from
    the node that computed it first. Their own caches must be off. `known` are block hashes that are there from the
    beginning, each with the node that has them.

    `drop_share` is the most that Algorithm 1 may prune at a time, as a share of the requests that it orders; pruned
    requests go to the scavenger level, as with live agents (`AgentConfig.drop_share`). KV is due, as with live engines,
    at the time from which the decode engine's first step would make the request late.
    """

    policy: tuple[str, Mapping[str, Any]] = ("mfs", NO_PARAMS)
    permits: Permits | None = None
    promote_s: float = 0.005
    reuse: bool = True
    known: Mapping[int, str] = field(default_factory=dict)
    drop_share: float = 0.0

    def __post_init__(self) -> None:
        _require(
            "FlowSetup",
            [
                (self.promote_s > 0, f"promote_s is {self.promote_s}: must be > 0"),
                (0 <= self.drop_share <= 1, f"drop_share is {self.drop_share}: must be in [0, 1]"),
            ],
        )


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The configuration of one run.

    `prefill` and `decode` are pairs (policy name, parameters) as in `policies.routing.registry`, `admission` is one as
    in `policies.admission.registry`, and `fairness` one as in `policies.fairness.registry`.

    With `learn_contention` the oracle also tells how much our transfers slow each other down, as it was learnt from
    those that have ended (`policies.network.contention`).

    With `flows`, a policy schedules the flows on the `network`; without it they share their links fairly.

    Requests that arrive in the window [warmup_s, warmup_s + measure_s) are measured; with `measure_s` None it lasts to
    the end of the workload. Steps, links and the duration are measured in the same window, which ends early where the
    workload does. Requests that arrive later keep the load up until the measured ones have ended. Without `drain` the
    run ends with the window, and requests that have not ended then count as unfinished. This is for a cluster that
    never catches up with its load.
    """

    engines: tuple[EngineSpec, ...]
    prefill: tuple[str, Mapping[str, Any]] = ("join_shortest_queue", NO_PARAMS)
    decode: tuple[str, Mapping[str, Any]] = ("join_shortest_queue", NO_PARAMS)
    # the baseline, not the product's default: an experiment that is about admission names its policy
    admission: tuple[str, Mapping[str, Any]] = (OPEN, NO_PARAMS)
    fairness: tuple[str, Mapping[str, Any]] = ("none", NO_PARAMS)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    control: ControlPlane = field(default_factory=ControlPlane)
    network: NetworkSetup | None = None
    learn_contention: bool = False
    forecasts: Forecasting | None = None
    # Without it every engine keeps the role of its spec.
    roles: RoleSwitching | None = None
    # Without it the number of engines is fixed.
    scaling: FleetSetup | None = None
    flows: FlowSetup | None = None
    seed: int = 0
    warmup_s: float = 0.0
    measure_s: float | None = None
    drain: bool = True
    # The greatest output length of a request that names none.
    default_max_tokens: int = 16_384

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.engines]
        _require(
            "simulation",
            [
                (bool(names), "no engines: name at least one group"),
                (len(set(names)) == len(names), f"engine groups share a name: {names}"),
                (
                    self.roles is None
                    or all(not e.barrier and e.layers is None and e.prefill_queue for e in self.engines),
                    "engines with layers, a barrier or no prefill queue cannot switch roles",
                ),
                (
                    self.roles is None or self.scaling is None,
                    "roles and scaling both decide on roles: give one of them",
                ),
                (
                    self.scaling is None or len({_kind(spec) for spec in self.engines}) == 1,
                    "with scaling all engines must be alike but for name, role, count and place",
                ),
                (
                    self.scaling is None
                    or all(not e.barrier and e.layers is None and e.prefill_queue for e in self.engines),
                    "engines with layers, a barrier or no prefill queue cannot be scaled",
                ),
                (
                    not self.dispatch.lend_prefixes
                    or all(e.layers is None and e.prefill_queue for e in self.engines),
                    "engines with layers or without a prefill queue lend no prefixes: leave lend_prefixes off",
                ),
                (
                    self.flows is None or self.network is not None,
                    "flows are scheduled on a network: set `network` to a Fabric",
                ),
                (
                    not self.learn_contention or (self.network is not None and self.flows is None),
                    "contention is learnt from transfers on a network without a flow policy: set `network` to a Fabric",
                ),
                (self.warmup_s >= 0, f"warmup_s is {self.warmup_s}: must be >= 0"),
                (self.measure_s is None or self.measure_s > 0, f"measure_s is {self.measure_s}: must be > 0"),
            ],
        )


def _kind(spec: EngineSpec) -> EngineSpec:
    """Returns what is left of an engine group without its name, role, number and places."""
    return dataclasses.replace(spec, name="", role=Role.PREFILL, count=1, nodes=(), nics=(), spans=())
