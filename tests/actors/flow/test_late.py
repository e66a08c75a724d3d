"""A lender that stands still, at a real agent: its reads give up their slots, and others go on."""

from pathlib import Path

from actors.flow.agent import FlowAgent
from actors.flow.config import AgentConfig
from actors.wire.channel import Identity
from tests.actors.flow.agents import CHUNKED, PATIENT, Reads, flow, until


async def test_a_lender_that_stands_still_does_not_stop_the_reads_of_others(tmp_path: Path) -> None:
    config = AgentConfig(arbiter={**CHUNKED, "late_s": 0.05}, **PATIENT)  # type: ignore[arg-type]
    agent = FlowAgent(Identity("agent", "agent-z"), "z", {"a", "y", "z"}, config)
    stuck, other = Reads("z"), Reads("z")
    # of what it reads from a nothing arrives
    stuck.keep = True
    try:
        await agent.start([f"unix:{tmp_path}/z.sock"])
        await stuck.join(agent)
        await other.join(agent)
        stuck.submit(flow("f", "a", "z", 40))
        await until(lambda: len(stuck.permits) == 2, "the ingress is not full")
        other.submit(flow("g", "y", "z"))
        await until(lambda: not other.left["g"], "it waits for a lender that stands still")
        assert agent.report().totals["late_chunks"] >= 2
        assert len(stuck.permits) == 2
        stuck.keep = False
        stuck.answer()
        await until(lambda: not len(agent.desk), "what was late does not end")
        assert not stuck.left["f"]
    finally:
        await agent.stop()
