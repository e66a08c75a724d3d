"""Forks of weights against closed forms on ports of one byte a second."""

import pytest

from benchmarks.sim.fork import Fork, Shape
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.network.network import Network
from benchmarks.sim.network.topology import Topology, TopologyConfig

GBIT = 8.0


def network(nodes: int) -> tuple[Kernel, Network, list[str]]:
    """Returns a rack whose nodes have ports of 1e9 bytes/s, without latency."""
    topology = Topology.build(
        TopologyConfig(
            pods=1,
            racks_per_pod=1,
            nodes_per_rack=nodes,
            nvlink_gbyte_per_s=100,
            nic_gbit_per_s=GBIT,
            rack_oversubscription=1.0,
            pod_oversubscription=1.0,
        )
    )
    kernel = Kernel()
    return kernel, Network(topology, kernel, 0), list(topology.nodes)


def seconds(engines: int, shape: Shape, chunks: int, fan_out: int = 2) -> float:
    kernel, net, nodes = network(engines + 1)
    fork = Fork(kernel, net, nodes, 16_000_000_000, 16_000_000_000 // chunks, shape, fan_out)
    kernel.run()
    assert fork.ended and len(fork.done_s) == engines
    assert sum(tier.finished for tier in net.totals.tiers.values()) == engines * chunks
    return fork.seconds


@pytest.mark.parametrize(("engines", "expected"), [(1, 16.0), (4, 64.0), (16, 256.0)])
def test_a_star_takes_as_long_as_its_source_sends(engines: int, expected: float) -> None:
    assert seconds(engines, "star", 16) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("engines", "fan_out", "expected"),
    [
        # a chain: 16 chunks of a second, then one second more for each hop
        (4, 1, 16.0 + 3.0),
        # full binary trees: ports are shared by two, so a chunk takes 2 s
        (2, 2, 32.0),
        (6, 2, 32.0 + 2.0),
        (14, 2, 32.0 + 4.0),
    ],
)
def test_a_tree_passes_chunks_on(engines: int, fan_out: int, expected: float) -> None:
    assert seconds(engines, "tree", 16, fan_out) == pytest.approx(expected)


def test_a_fork_behind_other_flows_takes_what_they_leave() -> None:
    """The source's port is taken for 10 s by a flow of level 0: the fork of level 1 begins after it."""
    kernel, net, nodes = network(3)
    net.start(nodes[0], nodes[2], 10_000_000_000, 0, None)
    fork = Fork(kernel, net, nodes[:2], 4_000_000_000, 1_000_000_000, "tree", priority=1)
    kernel.run()
    assert fork.seconds == pytest.approx(14.0)


def test_impossible_forks_are_refused() -> None:
    kernel, net, nodes = network(3)
    for wrong in ((nodes[:1], 10, 1), (nodes[:1] * 2, 10, 1), (nodes, 0, 1), (nodes, 10, 0)):
        with pytest.raises(ValueError, match="fork"):
            Fork(kernel, net, *wrong, "tree")
    unfinished = Fork(kernel, net, nodes, 10, 1, "star")
    with pytest.raises(ValueError, match="run on"):
        _ = unfinished.seconds
