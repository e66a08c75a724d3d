"""The fat tree as the `network` of a simulation's configuration (`benchmarks.sim.config.NetworkSetup`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.sim.kernel import Kernel
from benchmarks.sim.network.background import Background
from benchmarks.sim.network.clusters import Instance, nic_of
from benchmarks.sim.network.network import Network
from benchmarks.sim.network.oracle_feed import measured_oracle
from benchmarks.sim.network.topology import Topology
from policies.network.oracle import Oracle


@dataclass(frozen=True, slots=True)
class Fabric:
    """The setup of a fat tree: its topology, its background traffic, and its oracle.

    The router gets a new oracle every `oracle_s` seconds, or none where that is None. `uplinks` are the tiers' uplinks
    as the oracle reports them (`Topology.tier_uplinks`); None reports nothing, as in NetKV. The use of links is
    measured from `use_from_s` on, which should be the run's `warmup_s`.
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
        """Returns a new network on `kernel`, and a function from the present time (s) to the oracle measured then."""
        network = Network(self.topology, kernel, seed, self.background)
        if self.use_from_s > 0:
            kernel.at(self.use_from_s, network.mark)
        refresh_s = self.oracle_s or 1.0
        return network, lambda now_s: measured_oracle(
            network, now_s, refresh_s, self.own_flows_excluded, self.uplinks
        )


def nodes_and_nics(
    topology: Topology, instances: Sequence[Instance]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the nodes of the instances and the NICs of their first GPUs, for `EngineSpec.nodes` and `.nics`."""
    return tuple(i.node for i in instances), tuple(nic_of(topology, i) for i in instances)
