"""The reports of an agent to its router."""

import asyncio
from pathlib import Path

import pytest

from actors.flow.agent import FlowAgent
from actors.flow.config import AgentConfig
from actors.wire.channel import Channel, Identity
from actors.wire.messages import FlowReport, Message
from actors.wire.sockets import listen
from tests.actors.flow.agents import until


class Broken(FlowAgent):
    """An agent whose first reports fail."""

    fails = 3

    def report(self) -> FlowReport:
        if self.fails:
            self.fails -= 1
            raise KeyError("no such flow")
        return super().report()


async def test_a_report_that_fails_is_said_and_not_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    came: list[Message] = []
    server, address = await listen(
        f"unix:{tmp_path}/router.sock",
        lambda: Channel(Identity("router", "r"), lambda channel, message: came.append(message)),
    )

    async def find_router() -> tuple[str, ...]:
        return (address,)

    agent = Broken(Identity("agent", "z"), "z", set(), AgentConfig(report_s=0.01), find_router)
    agent.fails = 0
    try:
        await agent.start([f"unix:{tmp_path}/z.sock"])
        await until(lambda: came, "the first report does not come")
        agent.fails = 3
        await until(lambda: not agent.fails, "the reports have ended")
        number = len(came)
        await until(lambda: len(came) > number, "the reports have ended")
        assert "no report" in caplog.text
    finally:
        await agent.stop()
        server.close()
        await asyncio.sleep(0)
