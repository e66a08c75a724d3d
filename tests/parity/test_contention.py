"""One learner in two bodies: from the transfers of a simulated run the live router learns the simulator's contention.

The live router receives the transfers of the simulator as its own messages: intents, admissions, reports and ends of
attempts. The network file has the tiers and places of the simulated network. From the run's journal the same
decisions come out, which depend on what was learnt.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.router.network.feed import NetworkConfig, RouterNetwork
from actors.wire.messages import EngineInfo, Transfer, Transferred
from benchmarks.sim.cluster import Cluster
from benchmarks.sim.config import IDEAL, EngineSpec, SimConfig
from benchmarks.sim.network.clusters import netkv_cluster
from benchmarks.sim.network.fabric import Fabric
from benchmarks.sim.profiles import load
from benchmarks.workloads.record import WorkloadRequest
from policies.journal.replay import replay
from policies.network.contention import FORMS, SHARED, Contention
from policies.network.oracle import TransferIntent
from policies.network.own_transfers import OwnTransfers
from policies.routing.base import Needs
from policies.state.views import Role

PROFILE = load("netkv_llama3_70b_tp4_h100")
TOPOLOGY = netkv_cluster(64)
# 2 pods x 2 racks x 2 nodes, in this order
NODES = tuple(TOPOLOGY.nodes)
LIVE_IN_S = 1000.0
"""The time on the live router's clock at which the simulation begins; a clock is never at 0."""

Call = tuple[str, tuple[Any, ...], Any]
"""A method of `OwnTransfers`, its arguments, and what it returned."""


def simulated(form: str, patch: pytest.MonkeyPatch) -> tuple[Cluster, list[Call], list[str]]:
    """A run in which transfers share NICs; all that its learner was told, and its journal."""
    calls: list[Call] = []
    for name in ("began", "arrived", "dropped", "taught"):
        real = getattr(OwnTransfers, name)

        def told(self: OwnTransfers, *facts: Any, _name: str = name, _real: Any = real) -> Any:
            calls.append((_name, facts, _real(self, *facts)))
            return calls[-1][-1]

        patch.setattr(OwnTransfers, name, told)
    engines = [
        EngineSpec(f"p{i}", Role.PREFILL, 1, PROFILE, nodes=(NODES[i],), nics=(0,)) for i in range(2)
    ] + [
        EngineSpec(f"d{i}", Role.DECODE, 1, PROFILE, nodes=(NODES[i],), nics=(1,))
        for i in range(1, len(NODES))
    ]
    config = SimConfig(
        tuple(engines),
        decode=("netkv", {"contention": form}),
        control=IDEAL,
        network=Fabric(TOPOLOGY),
        learn_contention=True,
    )
    work = [WorkloadRequest(f"r{i}", 0.05 * i, 500 + 97 * i % 3000, 20) for i in range(120)]
    lines: list[str] = []
    cluster = Cluster(config, iter(work), lambda text: lines.extend(text.splitlines()), None)
    cluster.run()
    patch.undo()
    return cluster, calls, lines


def live(folder: Path, cluster: Cluster) -> RouterNetwork:
    """The live router's network, with the simulated one in its file."""
    file = folder / "network.yaml"
    tiers = {
        tier: {"bandwidth_bytes_per_s": rate, "latency_s": TOPOLOGY.tier_latency_s[tier]}
        for tier, rate in TOPOLOGY.tier_bytes_per_s.items()
    }
    nodes = {node: {"rack": place.rack, "pod": place.pod} for node, place in TOPOLOGY.places.items()}
    file.write_text(yaml.safe_dump({"tiers": tiers, "nodes": nodes}))
    found = RouterNetwork(NetworkConfig(str(file)))
    for name, worker in cluster.workers.items():
        role: Any = worker.spec.role.value
        found.engine(EngineInfo(name, role, "sim", "m", "g", (), 8, 100, 16, 1024, worker.node, 1, 30.0))
    found.want(Needs.NETWORK | Needs.CONTENTION)
    found.sources.set_nodes([
        {"NodeID": node, "Alive": True, "NodeManagerHostname": node, "Labels": {}} for node in NODES
    ])  # fmt: skip
    assert found.refresh(LIVE_IN_S) is not None
    return found


@pytest.mark.parametrize("form", FORMS)
def test_the_live_router_learns_what_the_simulator_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    cluster, calls, lines = simulated(form, monkeypatch)
    router = live(tmp_path, cluster)
    assert router._own is not None
    learnt: list[Contention] = []
    for name, facts, result in calls:
        if name == "began":
            attempt_id, sender, receiver, tier, _, now_s = facts
            router.routed(TransferIntent(attempt_id, sender, receiver, 1, 0, tier), LIVE_IN_S + now_s)
        elif name == "arrived":
            attempt_id, n_bytes, seconds, now_s = facts
            router.admitted(attempt_id)
            report = Transferred([Transfer(attempt_id, n_bytes, seconds, 1, 0.0)])
            router.transferred(report, LIVE_IN_S + now_s)
        elif name == "dropped":
            router.closed(facts[0])
        else:
            oracle, now_s = facts
            router.refresh(LIVE_IN_S + now_s)
            assert router._own.taught(oracle, LIVE_IN_S + now_s) == result
            learnt.append(result.contention)
    assert [name for name, _, _ in calls].count("arrived") == 120
    # transfers slowed each other down on several tiers
    assert len(learnt) > 5
    assert len(learnt[-1][form]) > 1
    assert any(max(curve.slopes) > 0.01 for curve in learnt[-1][form].values())
    steps = list(replay(lines))
    assert any('"contention"' in line for line in lines)
    # decisions show by what factor, and from how many transfers it was learnt; the replay decides alike to the byte
    decided = [line for line in lines if '"slowdown":1.' in line]
    if form == SHARED:
        # a tier on which nothing has ended stands beside those that have taught it their level
        assert any(re.search(r'"learnt_from":[1-9]', line) for line in decided)
    else:
        assert any('"learnt_from":0.0' not in line for line in decided)
    assert all(step.equal for step in steps)
