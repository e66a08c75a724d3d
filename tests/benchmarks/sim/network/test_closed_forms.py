"""Queueing theory's processor sharing, and the certificate of max-min rates on a cluster under load."""

import random
from collections import defaultdict

import pytest

from benchmarks.sim.kernel import Kernel
from benchmarks.sim.network.clusters import netkv_cluster, netkv_instances, prefill_and_decode
from benchmarks.sim.network.flows import Flow
from benchmarks.sim.network.network import Network

from .nets import network, rate_bytes_per_s

GB = 10**9


@pytest.mark.parametrize("fixed_sizes", [False, True])
def test_poisson_arrivals_on_one_link_are_processor_sharing(fixed_sizes):
    """M/M/1-PS and M/D/1-PS: mean duration = mean size / (capacity (1 - rho)), whatever the sizes' distribution.

    NIC 1e9 bytes/s, mean size 1e9 bytes, 0.3 flows/s: 1 / (1 - 0.3) = 1.4286 s.
    """
    net, kernel, _ = network()
    rng, flows = random.Random(4), list[Flow]()

    def arrive() -> None:
        n_bytes = GB if fixed_sizes else round(rng.expovariate(1 / GB)) + 1
        flows.append(net.start("node0", "node1", n_bytes, 0, None))
        if len(flows) < 20_000:
            kernel.after(rng.expovariate(0.3), arrive)

    kernel.after(0.0, arrive)
    kernel.run()
    rho = sum(flow.n_bytes for flow in flows) / GB / kernel.now_s
    total_s = sum(flow.duration_s or 0.0 for flow in flows)
    assert total_s / sum(flow.ideal_s for flow in flows) == pytest.approx(1 / (1 - rho), rel=0.01)


@pytest.mark.parametrize(("gpus", "levels"), [(64, 1), (256, 1), (256, 3)])
def test_under_load_every_flow_has_a_bottleneck(gpus, levels):
    """After hundreds of starts, ends, cancels and promotions each flow's path has a link that its level fills and on
    which no flow of its level is faster: the certificate of max-min rates; and no link carries more than it can."""
    topology, kernel, rng = netkv_cluster(gpus), Kernel(), random.Random(gpus + levels)
    net = Network(topology, kernel, seed=5)
    prefill, decode = prefill_and_decode(netkv_instances(topology))
    flows: list[Flow] = []
    for _ in range(600):
        start_s = kernel.now_s + rng.expovariate(200)
        kernel.run(start_s)
        source, target = rng.choice(prefill).node, rng.choice(decode).node
        flows.append(net.start(source, target, rng.randrange(1, GB), rng.randrange(levels), None))
        flow = rng.choice(flows)
        if flow.active and rng.random() < 0.3:
            net.set_priority(flow, rng.randrange(levels))
        elif flow.active and rng.random() < 0.1:
            net.cancel(flow)
    kernel.run(kernel.now_s)
    sending = [flow for flow in flows if net.remaining_bytes(flow) > 0]
    assert len(sending) > 50
    rates = {flow.id: rate_bytes_per_s(net, flow) for flow in sending}
    on = defaultdict(list)
    for flow in sending:
        for link in flow.links:
            on[link].append(flow)

    def carried(link: int, level: int) -> float:
        return sum(rates[f.id] for f in on[link] if f.level <= level)

    for link, users in on.items():
        assert carried(link, levels) <= topology.links[link].bytes_per_s * (1 + 1e-6), users
    for flow in sending:
        assert any(
            carried(link, flow.level) >= topology.links[link].bytes_per_s * (1 - 1e-6)
            and all(
                rates[f.id] <= rates[flow.id] * (1 + 1e-6) + 1e-3 for f in on[link] if f.level == flow.level
            )
            for link in flow.links
        )
