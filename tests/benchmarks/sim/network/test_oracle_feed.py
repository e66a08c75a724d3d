"""The oracle says what the operator's telemetry would: tiers, places, and congestion without our own flows."""

import pytest

from benchmarks.sim.network.background import Background, Piecewise, Static
from benchmarks.sim.network.oracle_feed import congestion, measured_oracle
from policies.network.oracle import NodePlace, PathSource

from .nets import network

GB = 10**9


def test_static_parts():
    net, _, _ = network(latency_us=(1, 3, 8, 15))
    oracle = measured_oracle(net, 0.0, 1.0)
    assert oracle.bandwidth_bytes_per_s == pytest.approx({0: 1e11, 1: 1e9, 2: 5e8, 3: 2.5e8})
    assert oracle.latency_s == pytest.approx({0: 1e-6, 1: 3e-6, 2: 8e-6, 3: 15e-6})
    assert oracle.places["node6"] == NodePlace("rack3", "pod1")
    for target in ("node0", "node1", "node2", "node5"):
        assert oracle.tier("d0", "node0", "d1", target) == net.tier("node0", target)


@pytest.mark.parametrize(
    ("where", "share", "expected"),
    [
        ("all", 0.4, {0: 0.0, 1: 0.4, 2: 0.4, 3: 0.4}),
        ("core", 0.4, {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.4}),
        # a NIC has 1e9 * 0.4 = 4e8 left: less than a rack link's 5e8 (c = 0.2), more than a core link's 2.5e8
        ("nic", 0.6, {0: 0.0, 1: 0.6, 2: 0.2, 3: 0.0}),
        # one of 4 core links: the tier's mean hides it
        ("pod0/agg0/core0/up", 0.8, {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.2}),
    ],
)
def test_congestion_by_tier(where, share, expected):
    net, _, _ = network(background=(Background(where, Static(share)),))
    assert congestion(net) == pytest.approx(expected)


def test_own_flows_count_only_where_they_cannot_be_told_apart():
    """All 16 NIC links: one up and one down are full, so their mean is 2 / 16."""
    net, _, _ = network()
    net.start("node0", "node1", GB, 0, None)
    assert set(congestion(net).values()) == {0.0}
    blurred = measured_oracle(net, 0.0, 1.0, own_flows_excluded=False)
    assert not blurred.own_flows_excluded
    assert blurred.congestion[1] == pytest.approx(2 / 16)


def test_a_measurement_is_of_its_time_and_lasts_for_a_while():
    net, kernel, _ = network(background=(Background("all", Piecewise(((0.0, 0.0), (1.2, 0.5)))),))
    told = {}
    for at_s in (1.1, 1.2):
        kernel.at(at_s, lambda: told.update({kernel.now_s: measured_oracle(net, kernel.now_s, 60.0)}))
    kernel.run()
    assert [oracle.congestion[3] for oracle in told.values()] == [0.0, 0.5]
    # stale after twice its 60 s, so it counts at 110 s: half of 2.5e8 is left, which one own flow would share
    path = told[1.2].path("d0", "node0", "d1", "node4", now_s=110.0)
    assert path is not None and path.source is PathSource.CONGESTION
    assert path.residual_bytes_per_s == pytest.approx(1.25e8)
