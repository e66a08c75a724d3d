"""The fat tree under the simulated cluster: NetKV's placement, its tiers, its policy, and bytes that agree."""

import dataclasses
import random

import pytest

from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import EngineSpec, SimConfig
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.network.background import Background, Static
from benchmarks.sim.network.clusters import netkv_cluster, netkv_instances, prefill_and_decode
from benchmarks.sim.network.fabric import Fabric, nodes_and_nics
from benchmarks.sim.network.network import Network
from benchmarks.sim.network.topology import TopologyError
from benchmarks.sim.records import RunResult
from benchmarks.workloads.record import WorkloadRequest
from policies.engine_model.timing import TimingProfile
from policies.state.views import Role

PROFILE = TimingProfile(
    source="test: round numbers, KV bytes of Llama-3-70B in FP16 (NetKV III-B)",
    prefill_base_s=0.01,
    prefill_per_token_s=1e-5,
    decode_base_s=0.01,
    decode_per_seq_s=1e-4,
    decode_per_kv_token_s=0.0,
    kv_bytes_per_token=327_680,
    transfer_bandwidth_bytes_per_s=1e9,
    transfer_latency_s=0.0,
)


def config(fabric: Fabric, **more: object) -> SimConfig:
    prefill, decode = prefill_and_decode(netkv_instances(fabric.topology))
    specs = []
    for name, role, instances in (("p", Role.PREFILL, prefill), ("d", Role.DECODE, decode)):
        nodes, nics = nodes_and_nics(fabric.topology, instances)
        specs.append(
            EngineSpec(
                name, role, len(instances), PROFILE, slots=64, nodes=nodes, nics=nics, transfer_flows=4
            )
        )
    return dataclasses.replace(SimConfig(tuple(specs), network=fabric), **more)  # type: ignore[arg-type]


def workload(n: int = 120, rate_per_s: float = 4.0) -> list[WorkloadRequest]:
    rng, at_s, requests = random.Random(2), 0.0, []
    for i in range(n):
        at_s += rng.expovariate(rate_per_s)
        requests.append(WorkloadRequest(f"r{i}", at_s, rng.randrange(4_000, 16_000), 20))
    return requests


def tiers(result: RunResult) -> dict[int | None, int]:
    counts: dict[int | None, int] = {}
    for record in result.requests:
        counts[record.tier] = counts.get(record.tier, 0) + 1
    return counts


def transfer_s(result: RunResult) -> float:
    durations = [(r.transfer_done_s or 0.0) - (r.transfer_started_s or 0.0) for r in result.requests]
    return sum(durations) / len(durations)


def test_round_robin_spreads_over_tiers_as_in_the_paper_and_netkv_comes_closer() -> None:
    fabric = Fabric(netkv_cluster())
    round_robin = simulate(config(fabric, decode=("round_robin", {})), workload())
    netkv = simulate(config(fabric, decode=("netkv", {})), workload())
    # 4 of 12 decode instances are in the prefill pod: 40 of 120 requests; none in the rack or on the node
    assert tiers(round_robin) == {2: 40, 3: 80}
    assert set(tiers(netkv)) <= {2, 3}
    assert tiers(netkv)[2] > 60
    assert transfer_s(netkv) < 0.9 * transfer_s(round_robin)
    for result in (round_robin, netkv):
        assert sum(result.tier_bytes.values()) == sum(r.transfer_bytes for r in result.requests)
        assert 0 < result.link_use["rack"] < 1
        assert 0 < result.link_use["core"] < 1
        assert result.link_use["nvlink"] == 0.0


def test_a_run_repeats_and_background_slows_it() -> None:
    fabric = Fabric(netkv_cluster())
    busy = Fabric(netkv_cluster(), background=(Background("all", Static(0.4)),))
    first, again, slow = (simulate(config(f), workload(40)) for f in (fabric, fabric, busy))
    assert repr(first.requests) == repr(again.requests)
    assert transfer_s(slow) > 1.3 * transfer_s(first)


def test_a_single_requests_transfer_takes_what_its_paths_give() -> None:
    """10,000 tokens = 3.2768e9 bytes in four flows over one NIC of 12.5e9 bytes/s: at least 0.262 s, and no more than
    if all four shared one core link of 3.125e9: 1.0486 s."""
    (record,) = simulate(config(Fabric(netkv_cluster())), [WorkloadRequest("r", 0.0, 10_000, 2)]).requests
    assert 0.262 < transfer_s_of(record.transfer_started_s, record.transfer_done_s) < 1.049 + 1e-3


def transfer_s_of(started_s: float | None, done_s: float | None) -> float:
    assert started_s is not None
    assert done_s is not None
    return done_s - started_s


def test_use_is_measured_from_a_time_on() -> None:
    """1.25e9 bytes inside the rack take 0.1 s; of 0.05 s to 0.2 s they fill 0.05 of 0.15 s, on 2 of 32 links."""
    kernel = Kernel()
    network, oracle = Fabric(netkv_cluster(), use_from_s=0.05).build(kernel, seed=1)
    assert isinstance(network, Network)
    assert network.link_use() == {}
    network.start("node0", "node1", 1_250_000_000, 0, None)
    kernel.at(0.2, lambda: None)
    kernel.run()
    assert network.link_use()["nic"] == pytest.approx(0.05 / 0.15 * 2 / 32)
    assert oracle(0.2).congestion_at_s == 0.2


def test_engines_on_unknown_nodes_and_impossible_refreshes_are_refused() -> None:
    lost = SimConfig(
        (EngineSpec("p", Role.PREFILL, 1, PROFILE), EngineSpec("d", Role.DECODE, 1, PROFILE)),
        network=Fabric(netkv_cluster()),
    )
    with pytest.raises(TopologyError, match="unknown node 'p-0'"):
        simulate(lost, workload(1))
    with pytest.raises(ValueError, match="oracle_s is 0"):
        Fabric(netkv_cluster(), oracle_s=0)


def test_uplinks_are_told_only_where_that_is_asked_for() -> None:
    for uplinks, told in ((None, {}), ({2: 4}, {2: 4})):
        _, oracle = Fabric(netkv_cluster(), uplinks=uplinks).build(Kernel(), 0)
        assert oracle(0.0).uplinks == told
