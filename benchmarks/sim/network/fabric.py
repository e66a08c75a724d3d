"""The fat tree as a simulated cluster's `network` (`benchmarks.sim.config.NetworkSetup`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchmarks.sim.kernel import Kernel
from benchmarks.sim.network.background import Background, parse_background
from benchmarks.sim.network.clusters import Instance, netkv_cluster, nic_of
from benchmarks.sim.network.network import Network
from benchmarks.sim.network.oracle_feed import measured_oracle
from benchmarks.sim.network.topology import Topology, TopologyError, explain
from policies.network.oracle import Oracle


@dataclass(frozen=True, slots=True)
class Fabric:
    """A topology and its background. `oracle_s`: how often the router gets a new oracle, None: it gets none.

    `uplinks`: what it tells of the tiers' uplinks (`Topology.tier_uplinks`), None: nothing, as in NetKV.
    `use_from_s`: links' use is measured from that time on; give it the run's `warmup_s`.
    """

    topology: Topology
    background: tuple[Background, ...] = ()
    oracle_s: float | None = 1.0  # NetKV V-B
    own_flows_excluded: bool = True
    use_from_s: float = 0.0
    uplinks: Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        if self.oracle_s is not None and not self.oracle_s > 0:
            raise ValueError(f"oracle_s is {self.oracle_s}: must be > 0, or None for no oracle")

    def build(self, kernel: Kernel, seed: int) -> tuple[Network, Callable[[float], Oracle]]:
        """A new network on `kernel`, and what its operator would say at a time, measured when it is asked."""
        network = Network(self.topology, kernel, seed, self.background)
        if self.use_from_s > 0:
            kernel.at(self.use_from_s, network.mark)
        refresh_s = self.oracle_s or 1.0
        return network, lambda now_s: measured_oracle(
            network, now_s, refresh_s, self.own_flows_excluded, self.uplinks
        )


class _NetKVKeys(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    gpus: int = 64
    pod_oversubscription: float = Field(default=4.0, gt=0)
    nics_per_node: int = Field(default=2, ge=1)


class _FabricKeys(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    topology: dict[str, Any] | None = None
    netkv: _NetKVKeys | None = None
    background: tuple[dict[str, Any], ...] = ()
    oracle_s: Annotated[float, Field(gt=0)] | None = 1.0
    own_flows_excluded: bool = True
    uplinks_told: bool = False

    @model_validator(mode="after")
    def _one_topology(self) -> Self:
        if (self.topology is None) == (self.netkv is None):
            raise ValueError(
                "give either topology (sizes and bandwidths) or netkv (gpus, pod_oversubscription)"
            )
        return self


def parse_fabric(raw: Mapping[str, Any], use_from_s: float = 0.0) -> Fabric:
    """From a config: `topology` (`TopologyConfig`'s keys) or `netkv` (`netkv_cluster`'s), `background` (a list, see
    `parse_background`), `oracle_s` (null: none), `own_flows_excluded`, `uplinks_told`. Raises TopologyError with every
    wrong key.
    """
    try:
        keys = _FabricKeys.model_validate(raw)
    except ValidationError as error:
        raise TopologyError(f"network: {explain(error, 'network')}") from error
    netkv = keys.netkv
    topology = Topology.build(keys.topology or {}) if netkv is None else netkv_cluster(**dict(netkv))
    background = parse_background(keys.background)
    for load in background:
        load.link_indices(topology)
    uplinks = topology.tier_uplinks() if keys.uplinks_told else None
    return Fabric(topology, background, keys.oracle_s, keys.own_flows_excluded, use_from_s, uplinks)


def nodes_and_nics(
    topology: Topology, instances: Sequence[Instance]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Where instances stand and the NIC of each one's first GPU, as `EngineSpec.nodes` and `.nics` want them."""
    return tuple(i.node for i in instances), tuple(nic_of(topology, i) for i in instances)
