"""Durations worked out by hand. Capacities in bytes/s: NIC 1e9, rack link 5e8, core link 2.5e8, NVLink 1e11."""

import collections

import pytest

from benchmarks.sim.network.flows import FlowError, FlowState
from benchmarks.sim.network.topology import TopologyError

from .nets import network, noting, rate_bytes_per_s, start_at

GB = 10**9


@pytest.mark.parametrize(
    ("target", "tier", "seconds"),
    [("node0", 0, 0.01), ("node1", 1, 1.0), ("node3", 2, 2.0), ("node7", 3, 4.0)],  # 1e9 / capacity
)
def test_a_lone_flow_gets_its_tiers_bandwidth(target, tier, seconds):
    net, kernel, _ = network(latency_us=(10, 20, 30, 40))
    flow = net.start("node0", target, GB, 0, None)
    kernel.run()
    assert (flow.tier, net.tier("node0", target), flow.state) == (tier, tier, FlowState.DONE)
    assert flow.duration_s == pytest.approx(seconds + (tier + 1) * 1e-5, rel=1e-9)
    assert flow.duration_s == pytest.approx(flow.ideal_s, rel=1e-9)
    assert flow.duration_s is not None
    assert GB / (flow.duration_s - flow.latency_s) == pytest.approx(
        net.topology.tier_bytes_per_s[tier], rel=1e-3
    )


@pytest.mark.parametrize("n", [2, 3, 7, 50])
@pytest.mark.parametrize("target", ["node0", "node1", "node3", "node7"])
def test_n_flows_get_one_nth(n, target):
    net, kernel, done = network()
    flows = [net.start("node0", target, GB, 0, noting(done, str(i))) for i in range(n)]
    bandwidth = net.topology.tier_bytes_per_s[flows[0].tier]
    for flow in flows:
        assert rate_bytes_per_s(net, flow) == pytest.approx(bandwidth / n)
    kernel.run()
    assert list(done.values()) == pytest.approx([n * GB / bandwidth] * n)


def test_staggered_arrivals():
    """Three flows over one NIC of 1e9 bytes/s; sizes and what is left in 1e9 bytes.

    0.0  A (2e9) alone at 1
    0.5  A has 1.5 left; B (0.6) arrives: 0.5 each
    1.0  A 1.25, B 0.35; C (0.1) arrives: 1/3 each
    1.3  C ends (0.1 / (1/3) = 0.3); A 1.15, B 0.25 left: 0.5 each
    1.8  B ends (0.25 / 0.5); A 0.9 left, alone at 1
    2.7  A ends
    """
    net, kernel, done = network()
    for at_s, name, n_bytes in ((0.0, "A", 2 * GB), (0.5, "B", 6 * GB // 10), (1.0, "C", GB // 10)):
        start_at(kernel, at_s, net, "node0", "node1", n_bytes, 0, noting(done, name))
    kernel.run()
    assert done == pytest.approx({"A": 2.7, "B": 1.8, "C": 1.3})


def test_flows_of_different_tiers_share_the_source_nic():
    """Max-min: the cross-pod flow is held to 0.25 by its core link, the other has 1 - 0.25 of the NIC.

    0.0  far (0.5e9) 0.25, near (1.95e9) 0.75
    2.0  far ends; near has 1.95 - 1.5 = 0.45 left, at 1
    2.45 near ends
    """
    net, kernel, done = network()
    near = net.start("node0", "node1", 1_950_000_000, 0, noting(done, "near"))
    net.start("node0", "node4", GB // 2, 0, noting(done, "far"))
    assert rate_bytes_per_s(net, near) == pytest.approx(0.75 * GB)
    kernel.run()
    assert done == pytest.approx({"far": 2.0, "near": 2.45})


def test_strict_levels():
    """One NIC. The urgent flow (level 0) stops the others; level 1 is shared; level 3 gets what is left: nothing.

    0.0  low (1e9, level 3) alone at 1
    0.2  low 0.8 left; A and B (0.3e9 each, level 1): 0.5 each, low 0
    0.4  A, B 0.2 left; urgent (0.1e9, level 0) at 1, all others 0
    0.5  urgent ends; A, B 0.5 each
    0.9  A, B end; low at 1 with 0.8 left
    1.7  low ends
    """
    net, kernel, done = network()
    plan = ((0.0, "low", 10, 3), (0.2, "A", 3, 1), (0.2, "B", 3, 1), (0.4, "urgent", 1, 0))
    for at_s, name, tenths, level in plan:
        start_at(kernel, at_s, net, "node0", "node1", tenths * GB // 10, level, noting(done, name))
    kernel.run()
    assert done == pytest.approx({"urgent": 0.5, "A": 0.9, "B": 0.9, "low": 1.7})


def test_a_lower_level_uses_what_the_higher_leaves():
    """The far flow (level 0) takes 0.25 of the NIC; the near one (level 5) has 0.75, not 0."""
    net, _, _ = network()
    far = net.start("node0", "node4", GB, 0, None)
    near = net.start("node0", "node1", GB, 5, None)
    assert (rate_bytes_per_s(net, far), rate_bytes_per_s(net, near)) == pytest.approx((0.25 * GB, 0.75 * GB))


def test_a_promotion_changes_the_order():
    """Two of 1e9 at level 1: 0.5 each. At 1.0 (0.5 left each) B goes to level 0: ends at 1.5; A has 0.5 left: 2.0."""
    net, kernel, done = network()
    net.start("node0", "node1", GB, 1, noting(done, "A"))
    b = net.start("node0", "node1", GB, 1, noting(done, "B"))
    kernel.at(1.0, lambda: net.set_priority(b, 0))
    kernel.run()
    assert done == pytest.approx({"A": 2.0, "B": 1.5})
    assert b.level == 0


def test_a_capped_flow_leaves_the_rest_to_others():
    """A is held to 0.25 of 1: B has 0.75 and ends at 4/3; then A's cap is lifted with 2/3 left, and it ends at 2."""
    net, kernel, done = network()
    a = net.start("node0", "node1", GB, 0, noting(done, "A"))
    net.set_rate_cap(a, 0.25 * GB)
    net.start("node0", "node1", GB, 0, noting(done, "B"))
    kernel.at(4 / 3, lambda: net.set_rate_cap(a, None))
    kernel.run()
    assert done == pytest.approx({"A": 2.0, "B": 4 / 3})
    assert net.link_use()["nic"] > 0
    assert net.totals.tiers[1].delivered_bytes == 2 * GB


def test_a_cap_that_changes_takes_effect_at_once_and_its_link_is_used_again():
    """0.25 for 2 s, then 0.5 for 1 s: 1 in all. The next capped flow takes the same private link with its own cap."""
    net, kernel, done = network()
    a = net.start("node0", "node1", GB, 3, noting(done, "A"))
    net.set_rate_cap(a, 0.25 * GB)
    kernel.at(2.0, lambda: net.set_rate_cap(a, 0.5 * GB))
    kernel.run()
    b = net.start("node2", "node3", GB, 0, noting(done, "B"))
    net.set_rate_cap(b, 0.1 * GB)
    kernel.run()
    assert done == pytest.approx({"A": 3.0, "B": 13.0})


def test_many_levels_come_and_go():
    """40 flows of 0.1 at levels of their own go one after another; each ends a tenth after the one before."""
    net, kernel, done = network()
    for level in reversed(range(40)):
        net.start("node0", "node1", GB // 10, level, noting(done, str(level)))
    kernel.run()
    assert done == pytest.approx({str(level): 0.1 * (level + 1) for level in range(40)})
    late: dict[str, float] = {}
    net.start("node0", "node1", GB, 7, noting(late, "late"))
    kernel.run()
    assert late == pytest.approx({"late": 5.0})


def test_impossible_caps_are_refused():
    net, _, _ = network()
    flow = net.start("node0", "node1", GB, 0, None)
    for cap in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(FlowError, match="rate cap"):
            net.set_rate_cap(flow, cap)


def test_cancelling_frees_the_share_and_calls_nobody():
    """0.5 each; at 1.0 A is cancelled with 0.5 left; B goes on at 1 and ends at 1.5."""
    net, kernel, done = network()
    a = net.start("node0", "node1", GB, 0, noting(done, "A"))
    net.start("node0", "node1", GB, 0, noting(done, "B"))
    kernel.at(1.0, lambda: net.cancel(a))
    kernel.run()
    assert done == pytest.approx({"B": 1.5})
    assert a.state == FlowState.CANCELLED
    assert net.totals.tiers[1].cancelled_bytes == pytest.approx(GB / 2)
    assert net.sending == 0


def test_a_flow_cancelled_in_the_instant_of_its_end_or_while_it_lands():
    net, kernel, done = network(latency_us=(0, 1e5, 1e5, 1e5))  # 0.1 s
    same = net.start("node0", "node1", GB, 0, noting(done, "same"))
    landing = net.start("node2", "node3", GB, 0, noting(done, "landing"))
    kernel.at(1.0, lambda: net.cancel(same), priority=-1)
    kernel.at(1.05, lambda: net.cancel(landing))
    kernel.run()
    assert done == {}
    assert net.totals.tiers[1].cancelled_bytes == pytest.approx(0.0, abs=1e-3)
    assert net.totals.tiers[1].delivered_bytes == pytest.approx(2 * GB)


def test_what_is_over_cannot_be_changed():
    net, kernel, _ = network()
    flow = net.start("node0", "node1", GB, 0, None)
    kernel.run()
    for change in (lambda: net.cancel(flow), lambda: net.set_priority(flow, 0)):
        with pytest.raises(FlowError, match="it is done"):
            change()
    assert net.totals.tiers[1].cancelled == 0


def test_no_bytes_take_the_latency():
    net, kernel, done = network(latency_us=(1, 3, 8, 15))
    net.start("node0", "node4", GB, 0, None)
    net.start("node0", "node4", 0, 9, noting(done, "empty"))
    kernel.run()
    assert done == pytest.approx({"empty": 15e-6})


def test_weights_share_unevenly():
    net, _, _ = network()
    heavy = net.start("node0", "node1", GB, 0, None, weight=3.0)
    light = net.start("node0", "node1", GB, 0, None)
    assert (rate_bytes_per_s(net, heavy), rate_bytes_per_s(net, light)) == pytest.approx(
        (0.75 * GB, 0.25 * GB)
    )


def test_nics_are_shared_or_not():
    """Two NICs: flows on one share it, flows on two do not."""
    net, kernel, done = network(nics_per_node=2)
    for name, nic in (("A", 0), ("B", 0), ("C", 1)):
        net.start("node0", "node1", GB, 0, noting(done, name), source_nic=nic, target_nic=nic)
    kernel.run()
    assert done == pytest.approx({"A": 2.0, "B": 2.0, "C": 1.0})


def test_ecmp_is_spread_and_repeats_with_the_seed():
    paths: dict[int, list[list[tuple[int, ...]]]] = {}
    for seed in (1, 1, 2):
        net, _, _ = network(seed=seed, aggs_per_pod=2, cores_per_agg=2)
        paths.setdefault(seed, []).append(
            [net.start("node0", "node4", GB, 0, None).links for _ in range(400)]
        )
    assert paths[1][0] == paths[1][1] != paths[2][0]
    counts = collections.Counter(paths[1][0])
    assert len(counts) == 4
    # binomial(400, 1/4): mean 100, standard deviation 8.7
    assert all(60 < count < 140 for count in counts.values())


def test_a_path_key_fixes_the_path_whatever_else_starts():
    net, _, _ = network(aggs_per_pod=4, cores_per_agg=4)
    other, _, _ = network(aggs_per_pod=4, cores_per_agg=4)
    first = [net.start("node0", "node4", GB, 0, None, path_key=f"r{i}").links for i in range(50)]
    for _ in range(17):
        other.start("node1", "node5", GB, 0, None)
    assert [other.start("node0", "node4", GB, 0, None, path_key=f"r{i}").links for i in range(50)] == first
    assert len(set(first)) > 8


def test_hash_collisions_cost_bandwidth():
    """Two cross-pod flows on one core link get half of it each, on two links all of it."""
    net, _, _ = network(cores_per_agg=2, core_link_gbit_per_s=2)
    flows = [net.start("node0", "node4", GB, 0, None) for _ in range(2)]
    while flows[0].links != flows[1].links:
        net.cancel(flows[1])
        flows[1] = net.start("node0", "node4", GB, 0, None)
    assert rate_bytes_per_s(net, flows[0]) == pytest.approx(0.125 * GB)
    net.cancel(flows[1])
    assert rate_bytes_per_s(net, flows[0]) == pytest.approx(0.25 * GB)


@pytest.mark.parametrize(
    ("source", "target", "options", "says"),
    [
        ("nodeX", "node1", {}, "unknown node 'nodeX'"),
        ("node0", "node9", {}, "unknown node 'node9'"),
        ("node0", "node1", {"source_nic": 1}, "node0 has no nic1"),
        ("node2", "node0", {}, "no path from node2 to node0.*rack0/agg0/down"),
        ("node4", "node0", {}, "no path from node4 to node0.*rack0/agg0/down"),
        ("node7", "node6", {}, "no path over node7: all its NIC links up are in missing_links"),
        ("node6", "node7", {"target_nic": -1}, "node7 has no nic-1"),
        ("node5", "node5", {}, "node5/nvlink is missing"),
    ],
)
def test_no_path_no_flow(source, target, options, says):
    net, kernel, _ = network(missing_links=["rack0/agg0/down", "node7/nic0/up", "node5/nvlink"])
    with pytest.raises(TopologyError, match=says):
        net.start(source, target, GB, 0, None, **options)
    kernel.run()
    assert (kernel.events, net.totals.tiers) == (0, {})


@pytest.mark.parametrize(
    "options",
    [{"n_bytes": -1}, {"n_bytes": float("nan")}, {"priority": -1}, {"weight": 0.0}, {"weight": float("nan")}],
)
def test_impossible_numbers_are_refused(options):
    net, _, _ = network()
    with pytest.raises(FlowError, match="node0 -> node1"):
        net.start("node0", "node1", on_done=None, **({"n_bytes": 1, "priority": 0} | options))
    assert net.totals.tiers == {}
