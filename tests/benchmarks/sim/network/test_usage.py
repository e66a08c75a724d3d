"""Bytes are conserved, on tiers and on links, whatever happens to the flows; runs repeat exactly."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sim.kernel import Kernel
from benchmarks.sim.network.background import Background, OnOff
from benchmarks.sim.network.flows import Flow
from benchmarks.sim.network.network import Network
from benchmarks.sim.network.usage import class_use, link_use

from .nets import network

GB = 10**9


def storm(
    seed: int, flows: int, run_until_s: float
) -> tuple[Network, Kernel, list[Flow], list[tuple[int, float]]]:
    """Random starts, cancels and changes of level over an on-off background; ends cut off at `run_until_s`."""
    net, kernel, _ = network(
        seed=seed, aggs_per_pod=2, background=(Background("core", OnOff(0.3, 0.5, 0.5)),)
    )
    rng = random.Random(seed)
    started: list[Flow] = []
    log: list[tuple[int, float]] = []

    def start() -> None:
        source, target = (f"node{rng.randrange(8)}" for _ in range(2))
        n_bytes = rng.choice((0, 1, rng.randrange(GB)))
        started.append(
            net.start(source, target, n_bytes, rng.randrange(3), lambda f: log.append((f.id, kernel.now_s)))
        )

    def disturb() -> None:
        active = [flow for flow in started if flow.active]
        if active and rng.random() < 0.5:
            net.cancel(rng.choice(active))
        elif active:
            net.set_priority(rng.choice(active), rng.randrange(3))

    for _ in range(flows):
        kernel.at(round(rng.uniform(0, 5), 2), start)
        kernel.at(round(rng.uniform(0, 6), 2), disturb)
    kernel.run(run_until_s)
    return net, kernel, started, log


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([2.5, 5.0, 1e9]))
def test_bytes_are_conserved(seed, until_s):
    net, _, flows, _ = storm(seed, 60, until_s)
    for tier, totals in net.totals.tiers.items():
        mine = [flow for flow in flows if flow.tier == tier]
        under_way = sum(flow.n_bytes for flow in mine if flow.active)
        assert totals.started_bytes == sum(flow.n_bytes for flow in mine)
        assert totals.delivered_bytes + totals.cancelled_bytes + under_way == pytest.approx(
            totals.started_bytes, rel=1e-9
        )
    sent = [0.0] * len(net.topology.links)
    cancelled = sum(totals.cancelled_bytes for totals in net.totals.tiers.values())
    left = 0.0
    for flow in flows:
        gone = flow.n_bytes - net.remaining_bytes(flow)
        left += flow.n_bytes - gone
        for link in flow.links:
            sent[link] += gone
    if cancelled == 0:
        assert net.usage().link_bytes == pytest.approx(sent, rel=1e-9, abs=1.0)
    # a path has one link out of its source: NVLink or a NIC
    out = sum(
        n_bytes
        for link, n_bytes in zip(net.topology.links, net.usage().link_bytes, strict=True)
        if link.kind == "nvlink" or (link.kind == "nic" and link.name.endswith("/up"))
    )
    assert out == pytest.approx(sum(flow.n_bytes for flow in flows) - cancelled - left, rel=1e-9, abs=1.0)


def test_everything_ends_and_nothing_is_left():
    net, kernel, flows, _ = storm(7, 300, 1e9)
    assert not any(flow.active for flow in flows)
    assert net.sending == 0
    assert all(rate == 0.0 for rate in net.own_shares())
    totals = net.totals.tiers.values()
    assert sum(t.started for t in totals) == sum(t.finished + t.cancelled for t in totals) == 300
    assert kernel.now_s < 1e6


def test_a_run_repeats_exactly():
    first, again, other = (storm(seed, 200, 1e9) for seed in (5, 5, 6))
    assert repr(first[3]) == repr(again[3])
    assert repr(first[0].usage()) == repr(again[0].usage())
    assert repr(first[3]) != repr(other[3])


def test_no_flow_beats_its_ideal_time():
    _, _, flows, _ = storm(11, 300, 1e9)
    done = [(flow.duration_s, flow.ideal_s) for flow in flows if flow.duration_s is not None]
    assert len(done) > 100
    assert all(duration_s >= ideal_s * (1 - 1e-9) - 1e-12 for duration_s, ideal_s in done)


def test_use_by_link_and_class():
    """1e9 bytes to the other pod in 4 s (core 2.5e8), measured over 8 s: NIC 1/8, rack 1/4, core 1/2 of capacity."""
    net, kernel, _ = network()
    begin = net.usage()
    net.start("node0", "node4", GB, 0, None)
    kernel.run(8.0)
    kernel.at(8.0, lambda: None)
    kernel.run()
    end = net.usage()
    use = link_use(net.topology, begin, end)
    assert use["node0/nic0/up"] == pytest.approx(1 / 8)
    assert use["rack2/agg0/down"] == pytest.approx(1 / 4)
    assert use["pod0/agg0/core0/up"] == pytest.approx(1 / 2)
    assert use["pod0/agg0/core0/down"] == 0.0
    # 16 NIC links, 8 rack links, 4 core links, of each 2 in use
    expected = {"nvlink": 0.0, "nic": 2 / 16 / 8, "rack": 2 / 8 / 4, "core": 2 / 4 / 2}
    assert class_use(net.topology, begin, end) == pytest.approx(expected)
    assert net.totals.delivered() == {3: GB}
    with pytest.raises(ValueError, match="behind the beginning"):
        link_use(net.topology, end, end)


def test_looking_changes_nothing():
    """Asking for usage in mid-flow rounds the state of the flows; all must end all the same, at the same times."""
    ends: dict[bool, list[float]] = {True: [], False: []}
    for look in ends:
        for seed in range(60):
            net, kernel, _ = network(seed=seed)
            rng = random.Random(seed)
            flows = []
            # each on links of its own: nothing but its own end touches it
            for i in range(3):
                flows.append(net.start(f"node{2 * i}", f"node{2 * i + 1}", rng.randrange(1, GB), 0, None))
            for _ in range(20):
                at_s = rng.random()
                if look:
                    kernel.at(at_s, net.usage)  # type: ignore[arg-type]
            kernel.run()
            assert all(flow.done_s is not None for flow in flows)
            ends[look] += [flow.done_s or 0.0 for flow in flows]
    assert ends[True] == pytest.approx(ends[False], rel=1e-12)
