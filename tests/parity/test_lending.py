"""One loan in two bodies: what live sim engines read, hit and compute of a lent prefix, the simulator's engines do too.

The live side is two sim engines over real sockets; the simulated side is the cluster of `lending_cluster`, where the
router has decided the loan. Prompt, prefix and block size are the same. What flow agents tell of their ports, on which
the router decides, is compared between an agent and the simulated network.
"""

from pathlib import Path
from typing import Any

import pytest

from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.flow.agent import FlowAgent
from actors.flow.config import AgentConfig
from actors.wire.channel import Identity
from actors.wire.messages import JoinNode, Prefill, PrefillDone, SubmitFlow
from benchmarks.sim.config import FlowSetup, Permits
from benchmarks.sim.flow_driver import IdealSwitches
from benchmarks.sim.kernel import Kernel
from benchmarks.sim.network.network import Network
from benchmarks.sim.permits import ByPermit
from policies.flow.ahead import bytes_ahead, read_place
from policies.flow.base import Flow, Stage
from policies.flow.mfs import SWEPT
from policies.flow.registry import flow_policy
from policies.state.views import NodeLoad
from tests.actors.engine.rig import Node, Rig
from tests.benchmarks.sim import lending_cluster as lending
from tests.benchmarks.sim.test_flow_driver import GB, ONE_SWITCH

PROMPT = list(range(10, 10 + 1650))


async def live(folder: Path, lend: bool) -> dict[str, int]:
    """The tokens and bytes of a prefill of PROMPT; before it, the lender computed a prompt with the same head."""
    async with Rig(folder) as rig:

        async def node(name: str) -> Node:
            sim = SimEngineConfig(
                name,
                "prefill",
                block_size_tokens=lending.BLOCK,
                max_model_len=4096,
                timing={"kv_bytes_per_token": lending.PROFILE.kv_bytes_per_token},
            )
            return await rig.node(SimEngine(sim), name)

        lender, reader = await node("l"), await node("p")
        other = [*PROMPT[: lending.HEAD], *range(50_000, 50_016)]
        await lender.prefilled("a", other)
        lender.client.release("a")
        handle = None
        if lend:
            handle = (await lender.prefilled("d", PROMPT[: lending.HEAD + 1])).handle
        reader.client.channel.send(Prefill("d", PROMPT, {}, 60.0, prefix=handle))
        done = await reader.client.wait("d", PrefillDone)
        reader.client.release("d")
        await reader.rests()
        await lender.rests()
        totals = [node.engine.metrics() for node in (lender, reader)]
        return {
            "hit_tokens": done.cached_tokens,
            "moved_bytes": totals[1].transfer_bytes,
            "reads": totals[1].transfers,
            "lender_tokens": totals[0].prefill_tokens - len(other),
            "reader_tokens": totals[1].prefill_tokens,
        }


def simulated(lend: bool) -> dict[str, int]:
    cluster, d, result = lending.run(lending.config(lend))
    tokens = {name: worker.model.prefill_tokens_total for name, worker in cluster.workers.items()}
    return {
        "hit_tokens": d.prefill_hit_tokens,
        "moved_bytes": int(result.peaks["prefix_bytes"]),
        "reads": int(result.peaks["prefixes_read"]),
        # a and c on p-0, b on p-1, of 1,616 tokens each
        "lender_tokens": tokens["p-0"] - 2 * 1616,
        "reader_tokens": tokens["p-1"] - 1616,
    }


async def test_a_loan_moves_and_saves_the_same_in_both_bodies(tmp_path: Path) -> None:
    lent = await live(tmp_path, True)
    assert lent == simulated(True)
    assert lent == {
        "hit_tokens": 1600,
        "moved_bytes": 1_600_000,
        "reads": 1,
        "lender_tokens": 1,
        "reader_tokens": 50,
    }


async def test_without_a_loan_both_compute_the_same(tmp_path: Path) -> None:
    computed = await live(tmp_path, False)
    assert computed == simulated(False)
    assert computed["reader_tokens"] == 1650


# ------------------------------------------------------------------------------------------ what goes before a read

FLOWS = (
    ("collective", Stage.COLLECTIVE, 0, None, 0),
    ("near", Stage.REUSE, 0, None, 0),
    ("far", Stage.REUSE, 4, None, 0),
    ("urgent", Stage.P2D, 0, 2.0, 0),
    ("lax", Stage.P2D, 0, 500.0, 1),
    ("free", Stage.P2D, 0, None, 1),
)
"""Flows by name, stage, relative layer index, deadline in seconds, and the number of the node that sends them to node
2. Each has 1 GB.
"""


def submitted() -> list[Flow]:
    return [
        Flow(
            flow_id=name,
            request_id=name,
            batch="b",
            stage=stage,
            source=f"node{sender}",
            target="node2",
            size=GB,
            due_s=due_s,
            rli=rli,
        )
        for name, stage, rli, due_s, sender in FLOWS
    ]


def told_live(policy: str, params: dict[str, Any]) -> list[NodeLoad]:
    """The report of an agent to whose workers on all three nodes the flows were submitted just now."""
    config = AgentConfig(policy=policy, params=params, arbiter={"port_bytes_per_s": 1e9})
    agent = FlowAgent(Identity("agent", "x"), "node0", {"node1", "node2"}, config)
    for node in ("node0", "node1", "node2"):
        worker = agent.desk.came(node, lambda message: None)
        agent.desk.take(worker, JoinNode(node), 0.0)
    for flow in submitted():
        agent.desk.take(worker, SubmitFlow(flow), 0.0)
    return list(agent.report().loads)


def told_simulated(policy: str, params: dict[str, Any], permits: Permits | None) -> list[NodeLoad]:
    """The report of a simulation in which they were sent just now."""
    setup, kernel = FlowSetup((policy, params), permits=permits), Kernel()
    kind = IdealSwitches if permits is None else ByPermit
    driver = kind(setup, kernel, Network(ONE_SWITCH, kernel, 1), lambda: True)
    seen: list[NodeLoad] = []
    for flow in submitted():
        driver.send(flow, lambda: None)
    # behind all that happens at once
    kernel.at(0.0, lambda: seen.extend(driver.loads(["node0", "node1", "node2"])), 1)
    kernel.run()
    return seen


@pytest.mark.parametrize(
    ("policy", "params"),
    [("mfs", {}), ("mfs", dict(SWEPT)), ("edf", {}), ("sjf", {}), ("karuna", {}), ("fair", {})],
)
async def test_agent_and_simulator_tell_the_same_of_what_goes_before_a_read(
    policy: str, params: dict[str, Any]
) -> None:
    told = told_live(policy, params)
    assert [load.node for load in told] == ["node0", "node1", "node2"]
    for permits in (Permits(), None):
        simulated = told_simulated(policy, params, permits)
        if permits is not None:
            assert simulated == told
        for size, rli in ((1, 0), (GB // 2, 1), (2 * GB, 9)):
            place = read_place(flow_policy(policy, params), size, rli, 1e9)
            for here, there in zip(told, simulated, strict=True):
                for port, other in ((here.egress, there.egress), (here.ingress, there.ingress)):
                    ahead = bytes_ahead(port, place, size, 0.0)
                    assert bytes_ahead(other, place, size, 0.0) == ahead
    # a read of 1 byte to node 2 finds there, by the paper's levels: the collective, near reuse, and what is urgent
    place = read_place(flow_policy(policy, params), 1, 0, 1e9)
    if (policy, params) == ("mfs", {}):
        assert bytes_ahead(told[2].ingress, place, 1, 0.0) == 3 * GB
