"""The cluster on the fat tree: transfer times of a lone request by tier, oracle refreshed, use and bytes counted."""

import dataclasses
import json

import pytest

from benchmarks.sim.cluster import simulate
from benchmarks.sim.config import IDEAL, EngineSpec, SimConfig
from benchmarks.sim.network.clusters import netkv_cluster
from benchmarks.sim.network.fabric import Fabric
from benchmarks.sim.profiles import load
from benchmarks.workloads.record import WorkloadRequest
from policies.state.views import Role

PROFILE = load("netkv_llama3_70b_tp4_h100")
# 2 pods x 2 racks x 2 nodes, in this order
NODES = tuple(netkv_cluster(64).nodes)
GBIT = 1e9 / 8
# 1,000 tokens x 327,680 bytes; four flows of one engine share one NIC of 100 Gbit/s, aggregation 50, core 25 Gbit/s
TRANSFERS = [(0, 0, 450e9, 1e-6), (1, 1, 100 * GBIT, 3e-6), (2, 2, 50 * GBIT, 8e-6), (4, 3, 25 * GBIT, 15e-6)]


def config(node: int, flows: int, **changes: object) -> SimConfig:
    decode = EngineSpec("d", Role.DECODE, 1, PROFILE, nodes=(NODES[node],), nics=(1,), transfer_flows=flows)
    prefill = EngineSpec("p", Role.PREFILL, 1, PROFILE, nodes=(NODES[0],), nics=(0,))
    base = SimConfig((prefill, decode), control=IDEAL, network=Fabric(netkv_cluster(64)))
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("node", "tier", "bytes_per_s", "latency_s"), TRANSFERS)
def test_a_lone_flow_gets_its_tier(node: int, tier: int, bytes_per_s: float, latency_s: float) -> None:
    result = simulate(config(node, 1), [WorkloadRequest("a", 0.0, 1000, 2)])
    (record,) = result.requests
    assert record.transfer_done_s is not None
    assert record.transfer_started_s is not None
    took_s = record.transfer_done_s - record.transfer_started_s
    assert took_s == pytest.approx(1000 * 327_680 / bytes_per_s + latency_s, rel=1e-6)
    assert (record.tier, result.tier_bytes) == (tier, {tier: 327_680_000})
    assert (result.link_use["nic"] > 0) == (tier > 0)


def test_flows_of_one_transfer_share_the_nic() -> None:
    """Four flows in a rack have together what one would have."""
    (record,) = simulate(config(1, 4), [WorkloadRequest("a", 0.0, 1000, 2)]).requests
    assert record.transfer_done_s is not None
    assert record.transfer_started_s is not None
    took_s = record.transfer_done_s - record.transfer_started_s
    assert took_s == pytest.approx(1000 * 327_680 / (100 * GBIT) + 3e-6, rel=1e-6)


@pytest.mark.parametrize(("period_s", "refreshes"), [(0.5, 5), (2.0, 2), (None, 0)])
def test_the_oracle_is_refreshed_at_its_period(period_s: float | None, refreshes: int) -> None:
    lines: list[str] = []
    network = Fabric(netkv_cluster(64), oracle_s=period_s)
    work = [WorkloadRequest("a", 0.0, 10, 2), WorkloadRequest("b", 2.2, 10, 2)]
    simulate(config(1, 1, network=network), work, journal=lines.append)
    events = [json.loads(line) for line in "".join(lines).splitlines()]
    told = [e["now_s"] for e in events if e.get("event") == "OracleRefreshed"]
    assert len([at for at in told if at < 2.2]) == refreshes


def test_contention_is_learnt_only_on_a_network() -> None:
    with pytest.raises(ValueError, match="contention is learnt from transfers on a network"):
        config(2, 1, network=None, learn_contention=True)
