"""The description of a simulation: engines, control plane, predictor, network, windows; checked when it is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

from benchmarks.sim.kernel import Kernel
from benchmarks.sim.links import KvNetwork
from policies.dispatch.dispatcher import DispatchConfig
from policies.engine_model.timing import TimingProfile
from policies.network.oracle import Oracle
from policies.state.views import Role
from predictors.forecast import ForecastConfig
from predictors.protocol import Outcome, Predictor


def _require(who: str, checks: list[tuple[bool, str]]) -> None:
    for ok, message in checks:
        if not ok:
            raise ValueError(f"{who}: {message}")


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Prefill in `groups` groups of layers, of equal compute time. After each group its collective runs (if it has
    bytes), and then its share of the KV may leave: the request is offered to the dispatcher after the first group.

    Collectives (MFS stage 2) are flows from the worker's node to `peer_node` ("" = its own) of
    `collective_bytes_per_token` bytes a prompt token and group; the next group computes when it has ended.
    """

    groups: int
    collective_bytes_per_token: float = 0.0
    peer_node: str = ""
    priority: int = 0

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
    """`count` equal engines, named `name`-0, -1, ...

    `nodes`: where they stand, one name per engine (empty: each on a node of its own name); `nics`: which NIC of it is
    theirs, one number per engine (empty: drawn per flow). `barrier`: workers with the
    same non-empty name end every step together. `kv_blocks` blocks of `block_size_tokens`. `prefix_cache` False: no
    prompt block is ever shared, and none is reported. `preempted`: what a preempted request does, queue again at its
    engine (vLLM) or go back to the router. `transfer_flows`: parallel flows of one KV transfer into this engine.
    `prefill_queue` False: a prefill engine that computes all prompts at once (`unlimited`).
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
    group: str = "g"
    barrier: str = ""
    nodes: tuple[str, ...] = ()
    nics: tuple[int, ...] = ()
    preempted: Literal["engine", "router"] = "engine"
    transfer_flows: int = 1
    layers: LayerPlan | None = None
    prefill_queue: bool = True

    def __post_init__(self) -> None:
        who = f"engines {self.name!r}"
        ones = ("count", "slots", "kv_blocks", "block_size_tokens", "prefill_budget_tokens", "transfer_flows")
        _require(
            who,
            [(getattr(self, key) >= 1, f"{key} is {getattr(self, key)}: must be >= 1") for key in ones]
            + [
                (self.lease_s > 0, f"lease_s is {self.lease_s}: must be > 0"),
                (
                    not self.nodes or len(self.nodes) == self.count,
                    f"{len(self.nodes)} nodes for {self.count} engines: give one each, or none",
                ),
                (
                    not self.nics or len(self.nics) == self.count,
                    f"{len(self.nics)} nics for {self.count} engines: give one each, or none",
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
        """Name, node and NIC of each engine."""
        names = [f"{self.name}-{i}" for i in range(self.count)]
        nics = self.nics or (None,) * self.count
        return list(zip(names, self.nodes or names, nics, strict=True))


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Latencies and rules of ingress and router; the periods are the live system's own.

    A message between two processes takes `hop_s`; a request crosses ingress -> router -> ingress -> engine for each of
    its two stages. `ingress_s` is the HTTP side of a request, both ways. Sum over a request's ten hops: the 2.3 ms of
    added TTFT that the overhead benchmark measured at concurrency 1 (README, Measured).
    """

    # docs/design.md, section 8: a request and its reply take 0.15 ms over a framed socket.
    hop_s: float = 75e-6
    ingress_s: float = 1.55e-3  # ASSUMPTION: what is left of the 2.3 ms
    status_s: float = 0.1
    status_always_s: float = 1.0
    tick_s: float = 0.2
    progress_s: float = 0.02
    forecast_s: float = 0.05
    kv_events: bool = True
    max_retries: int = 2
    lease_margin_s: float = 2.0
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        zero = ("hop_s", "ingress_s", "max_retries", "lease_margin_s")
        above = ("status_s", "status_always_s", "tick_s", "progress_s", "forecast_s", "request_timeout_s")
        _require(
            "control plane",
            [(getattr(self, k) >= 0, f"{k} is {getattr(self, k)}: must be >= 0") for k in zero]
            + [(getattr(self, k) > 0, f"{k} is {getattr(self, k)}: must be > 0") for k in above],
        )


IDEAL = ControlPlane(hop_s=0.0, ingress_s=0.0)
"""A control plane that takes no time, as the papers' simulators have it."""


class ForecastSource(Protocol):
    """Makes the run's predictor, fresh (it learns while it runs). `lengths` are the true output lengths by request."""

    def __call__(self, lengths: Mapping[str, int]) -> Predictor: ...


@dataclass(frozen=True, slots=True)
class Forecasting:
    """Predictors in the router, with the live one's settings (H, k, gate and floor); `source` makes the predictor.

    `total_at_arrival`: total lengths are forecast at arrival; None: while a policy decides that looks at them.
    `history`: what predictor and features have seen before the run, in order of time; its times lie before the run's 0.
    """

    source: ForecastSource
    window_tokens: int = 48  # ASSUMPTION: as the router's default
    states: ForecastConfig = field(default_factory=ForecastConfig)
    total_at_arrival: bool | None = None
    history: tuple[Outcome, ...] = ()


class NetworkSetup(Protocol):
    """A network for one run (`network.fabric.Fabric`). `oracle_s`: period of the oracle (None: there is none)."""

    @property
    def oracle_s(self) -> float | None: ...

    def build(self, kernel: Kernel, seed: int) -> tuple[KvNetwork, Callable[[float], Oracle | None]]:
        """The network on `kernel`, and the operator's view of it at a time."""
        ...


NO_PARAMS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One run. `prefill` and `decode` are (policy name, parameters) of `policies.routing.registry`.

    Requests that arrive in [warmup_s, warmup_s + measure_s) are measured (`measure_s` None: to the end of the
    workload); later ones keep the load up until the measured ones have ended. Steps, links and the duration are
    measured in that same time, which ends early where the workload does. `drain` False: the run ends with that time,
    and what has not ended by then is unfinished: for a cluster that never catches up with its load.
    """

    engines: tuple[EngineSpec, ...]
    prefill: tuple[str, Mapping[str, Any]] = ("join_shortest_queue", NO_PARAMS)
    decode: tuple[str, Mapping[str, Any]] = ("join_shortest_queue", NO_PARAMS)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    control: ControlPlane = field(default_factory=ControlPlane)
    network: NetworkSetup | None = None
    forecasts: Forecasting | None = None
    seed: int = 0
    warmup_s: float = 0.0
    measure_s: float | None = None
    drain: bool = True
    default_max_tokens: int = 16_384  # of a request that names none

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.engines]
        _require(
            "simulation",
            [
                (bool(names), "no engines: name at least one group"),
                (len(set(names)) == len(names), f"engine groups share a name: {names}"),
                (self.warmup_s >= 0, f"warmup_s is {self.warmup_s}: must be >= 0"),
                (self.measure_s is None or self.measure_s > 0, f"measure_s is {self.measure_s}: must be > 0"),
            ],
        )
