"""Small networks with round numbers, and what the tests ask of them."""

from typing import Any

from benchmarks.sim.kernel import Kernel
from benchmarks.sim.network.background import Background
from benchmarks.sim.network.flows import Flow
from benchmarks.sim.network.network import Network
from benchmarks.sim.network.topology import Topology

GBIT = 125_000_000  # bytes/s
SMALL: dict[str, Any] = {
    "pods": 2,
    "racks_per_pod": 2,
    "nodes_per_rack": 2,
    "nvlink_gbyte_per_s": 100,
    "nic_gbit_per_s": 8,  # 1e9 bytes/s
    "rack_link_gbit_per_s": 4,  # 5e8
    "core_link_gbit_per_s": 2,  # 2.5e8
    "latency_us": (0, 0, 0, 0),
}


def network(
    seed: int = 1, background: tuple[Background, ...] = (), **changes: object
) -> tuple[Network, Kernel, dict[str, float]]:
    """Of SMALL with changes; nodes 0-1 | 2-3 are pod 0's racks, 4-5 | 6-7 pod 1's. The dict fills with end times."""
    kernel = Kernel()
    return Network(Topology.build(SMALL | changes), kernel, seed, background), kernel, {}


def rate_bytes_per_s(net: Network, flow: Flow) -> float:
    """The flow's rate now; 0 when nothing is left to send."""
    net._settle_instant()
    return 0.0 if flow.bundle is None else flow.bundle.rate * flow.weight


def noting(done: dict[str, float], name: str) -> Any:
    """An `on_done` that notes when the flow was done."""

    def note(flow: Flow) -> None:
        assert name not in done
        assert flow.done_s is not None
        done[name] = flow.done_s

    return note


def start_at(kernel: Kernel, at_s: float, net: Network, *flow: Any) -> None:
    """`net.start(*flow)` at a time."""

    def start() -> None:
        net.start(*flow)

    kernel.at(at_s, start)
