"""NetKV's cluster has the bandwidths, latencies and shares of tiers that the paper prints."""

import collections

import pytest

from benchmarks.sim.kernel import Kernel
from benchmarks.sim.network.clusters import netkv_cluster, netkv_instances, nic_of, prefill_and_decode
from benchmarks.sim.network.network import Network
from benchmarks.sim.network.topology import TopologyError

from .nets import GBIT


def test_bandwidths_and_latencies_of_the_paper():
    topology = netkv_cluster()
    assert len(topology.nodes) * topology.config.gpus_per_node == 64
    assert topology.tier_bytes_per_s == pytest.approx({0: 450e9, 1: 100 * GBIT, 2: 50 * GBIT, 3: 25 * GBIT})
    assert topology.tier_latency_s == pytest.approx({0: 1e-6, 1: 3e-6, 2: 8e-6, 3: 15e-6})


@pytest.mark.parametrize(
    ("nics", "uplinks"), [(2, {0: 1, 1: 2, 2: 4, 3: 8}), (8, {0: 1, 1: 8, 2: 16, 3: 32})]
)
def test_uplinks_are_the_links_out_of_a_node_a_rack_and_a_pod(nics, uplinks):
    topology = netkv_cluster(nics_per_node=nics)
    assert topology.tier_uplinks() == uplinks
    # one NIC of 100 Gbit/s carries two flows of tier 2's 50 and four of tier 3's 25
    assert topology.tier_uplinks(nics=1) == {0: 1, 1: 1, 2: 2, 3: 4}
    for start, tier in (("node0/nic", 1), ("rack0/", 2), ("pod0/", 3)):
        found = [link for link in topology.links if link.name.startswith(start) and link.name.endswith("/up")]
        assert len(found) == uplinks[tier]


@pytest.mark.parametrize("nics", [1, 2, 8])
@pytest.mark.parametrize(
    ("ratio", "gbit"), [(1.0, (100, 100)), (2.0, (50, 50)), (4.0, (50, 25)), (8.0, (50, 12.5))]
)
def test_oversubscription_sweep(ratio, gbit, nics):
    topology = netkv_cluster(pod_oversubscription=ratio, nics_per_node=nics)
    assert topology.tier_bytes_per_s[1] == pytest.approx(100 * GBIT)
    assert (topology.tier_bytes_per_s[2] / GBIT, topology.tier_bytes_per_s[3] / GBIT) == pytest.approx(gbit)


@pytest.mark.parametrize("gpus", [64, 128, 256, 512, 1024])
def test_placement(gpus):
    topology = netkv_cluster(gpus)
    prefill, decode = prefill_and_decode(netkv_instances(topology))
    assert (len(prefill), len(decode)) == (gpus // 16, gpus * 3 // 16)
    tiers = collections.Counter(topology.tier(p.node, d.node) for p in prefill for d in decode)
    # by pair: 4 decode instances in the pod, all others beyond; at 64 GPUs 4 : 8, the paper's 32 : 68
    assert tiers == {2: len(prefill) * 4, 3: len(prefill) * (len(decode) - 4)}


def test_nics_of_gpus():
    topology = netkv_cluster(nics_per_node=2)
    first, second = netkv_instances(topology)[:2]
    assert [nic_of(topology, i, gpu) for i in (first, second) for gpu in range(4)] == [0, 0, 0, 0, 1, 1, 1, 1]
    many = netkv_cluster(nics_per_node=8)
    assert [nic_of(many, second, gpu) for gpu in range(4)] == [4, 5, 6, 7]
    with pytest.raises(TopologyError, match="has no GPU 4"):
        nic_of(topology, second, 4)


def test_impossible_sizes_are_refused():
    with pytest.raises(TopologyError, match="48 GPUs"):
        netkv_cluster(48)


@pytest.mark.parametrize(("slot", "tier"), [("node1", 1), ("node2", 2), ("node4", 3)])
def test_four_shards_on_one_path_take_the_tiers_bandwidth_together(slot, tier):
    topology, kernel = netkv_cluster(), Kernel()
    net = Network(topology, kernel, seed=3)
    flows = [net.start("node0", slot, 10**9, 0, None, source_nic=0, path_key="r1") for _ in range(4)]
    kernel.run()
    for flow in flows:
        expected = 4e9 / topology.tier_bytes_per_s[tier] + topology.tier_latency_s[tier]
        assert flow.duration_s == pytest.approx(expected)
