"""Sizes, capacities, tiers and routes; what cannot be is refused by name."""

from pathlib import Path

import pytest

from benchmarks.sim.network.topology import Topology, TopologyConfig, TopologyError
from policies.network.oracle import NodePlace

from .nets import GBIT, SMALL


def test_capacities_follow_from_oversubscription():
    topology = Topology.build(
        {
            "pods": 2,
            "racks_per_pod": 2,
            "nodes_per_rack": 4,
            "nics_per_node": 2,
            "aggs_per_pod": 4,
            "cores_per_agg": 2,
            "nvlink_gbyte_per_s": 450,
            "nic_gbit_per_s": 100,
            "rack_oversubscription": 2,
            "pod_oversubscription": 4,
        }
    )
    # hosts of a rack 4 * 2 * 100 = 800; 800 / 2 over 4 links = 100. Hosts of a pod 1600; 1600 / 4 over 4 * 2 links = 50
    assert topology.link("rack3/agg3/up").bytes_per_s == pytest.approx(100 * GBIT)
    assert topology.link("pod1/agg0/core1/down").bytes_per_s == pytest.approx(50 * GBIT)
    assert topology.tier_bytes_per_s == pytest.approx({0: 450e9, 1: 100 * GBIT, 2: 100 * GBIT, 3: 50 * GBIT})
    # nodes 16 * (NVLink + 2 NICs * 2 ways) + 4 racks * 4 links * 2 + 2 pods * 8 links * 2
    assert len(topology.links) == 16 * 5 + 32 + 32


def test_tiers_and_places():
    topology = Topology.build(SMALL)
    assert [topology.tier("node0", f"node{i}") for i in range(8)] == [0, 1, 2, 2, 3, 3, 3, 3]
    assert topology.tier("node5", "node4") == 1
    assert topology.places["node5"] == NodePlace(rack="rack2", pod="pod1")
    assert topology.tiers == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "tiers"),
    [({"pods": 1}, (0, 1, 2)), ({"pods": 1, "racks_per_pod": 1}, (0, 1)), ({"nodes_per_rack": 1}, (0, 2, 3))],
)
def test_tiers_that_no_pair_has_are_absent(changes, tiers):
    topology = Topology.build(SMALL | changes)
    assert topology.tiers == tiers
    assert tuple(topology.tier_bytes_per_s) == tiers
    assert tuple(topology.tier_latency_s) == tiers


def test_ecmp_groups_avoid_missing_links():
    config = SMALL | {"aggs_per_pod": 2, "cores_per_agg": 2}
    topology = Topology.build(config)
    near, far = (topology.nodes[n] for n in ("node2", "node4"))
    here = topology.nodes["node0"]
    assert len(topology.fabric_routes(here, near)) == 2
    assert len(topology.fabric_routes(here, far)) == 4
    cut = Topology.build(config | {"missing_links": ["pod1/agg1/core0/down", "rack1/agg0/down"]})
    routes = cut.fabric_routes(cut.nodes["node0"], cut.nodes["node4"])
    assert [[cut.links[i].name for i in route] for route in routes] == [
        ["rack0/agg0/up", "pod0/agg0/core0/up", "pod1/agg0/core0/down", "rack2/agg0/down"],
        ["rack0/agg0/up", "pod0/agg0/core1/up", "pod1/agg0/core1/down", "rack2/agg0/down"],
        ["rack0/agg1/up", "pod0/agg1/core1/up", "pod1/agg1/core1/down", "rack2/agg1/down"],
    ]
    assert len(cut.fabric_routes(cut.nodes["node0"], cut.nodes["node2"])) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pods": 0}, "pods"),
        ({"racks": 3}, "racks"),
        ({"nic_gbit_per_s": 0}, "nic_gbit_per_s"),
        ({"nic_gbit_per_s": float("inf")}, "nic_gbit_per_s"),
        ({"nvlink_gbyte_per_s": 0.5}, "slower than a NIC"),
        ({"rack_oversubscription": 2}, "either rack_oversubscription or rack_link_gbit_per_s"),
        ({"core_link_gbit_per_s": None}, "either pod_oversubscription or core_link_gbit_per_s"),
        ({"latency_us": (3, 1, 1, 1)}, "latency_us"),
        ({"latency_us": (1, 2, 3)}, "latency_us"),
        ({"missing_links": ["rack9/agg0/up"]}, "rack9/agg0/up"),
        ({"link_gbit_per_s": {"rack0/agg7/up": 1}}, "rack0/agg7/up"),
        ({"link_gbit_per_s": {"rack0/agg0/up": 0}}, "rack0/agg0/up"),
    ],
)
def test_impossible_topologies_are_refused(changes, says):
    with pytest.raises(TopologyError, match=says):
        Topology.build(SMALL | changes)


def test_single_links_may_differ():
    topology = Topology.build(SMALL | {"link_gbit_per_s": {"rack0/agg0/up": 1}})
    assert topology.link("rack0/agg0/up").bytes_per_s == GBIT
    assert topology.link("rack0/agg0/down").bytes_per_s == 4 * GBIT


def test_unknown_nodes_and_links_are_named():
    topology = Topology.build(SMALL | {"missing_links": ["rack0/agg0/up"]})
    with pytest.raises(TopologyError, match=r"unknown node 'node8'.*8, such as node0"):
        topology.tier("node0", "node8")
    with pytest.raises(TopologyError, match="unknown link 'node0/nic1/up'"):
        topology.link("node0/nic1/up")
    with pytest.raises(TopologyError, match="'rack0/agg0/up' is in missing_links"):
        topology.link("rack0/agg0/up")


def test_a_file_is_loaded_and_named_in_errors(tmp_path: Path):
    path = tmp_path / "net.yaml"
    lines = [f"{key}: {list(value) if isinstance(value, tuple) else value}" for key, value in SMALL.items()]
    path.write_text("\n".join(lines))
    assert Topology.load(path).config == TopologyConfig(**SMALL)
    path.write_text("\n".join([*lines, "speed: 1"]))
    with pytest.raises(TopologyError, match=r"net\.yaml.*speed"):
        Topology.load(path)
    path.write_text("pods: [1")
    with pytest.raises(TopologyError, match=r"net\.yaml"):
        Topology.load(path)
