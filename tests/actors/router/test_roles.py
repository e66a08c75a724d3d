"""A router has an engine serve another role, over real sockets, with sim engines."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.engine.report import Reporter
from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.ranks import sim_engine
from actors.router.roles import Roles
from actors.router.server import RouterServer
from actors.wire.channel import Identity
from actors.wire.messages import SetRole
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.routing.flowkv.regimes import RegimeThresholds
from policies.routing.flowkv.role_switch import RoleSwitchConfig
from policies.routing.registry import decode_policy, prefill_policy
from policies.state.views import Role
from tests.actors.engine.rig import Node, Rig, until

PROMPT = list(range(10, 60))
# every engine with work is busy, and lent at the next look; one without work is idle
EAGER = RegimeThresholds(prefill_low=0.01, prefill_high=100.0, decode_low=0.01, decode_high=100.0, idle=0.005)


class Cluster:
    def __init__(self, directory: Path, rig: Rig, router: RouterServer) -> None:
        self.directory, self.rig, self.router = directory, rig, router
        self.reporters: list[Reporter] = []

    async def engine(self, name: str, role: Any, **options: Any) -> Node:
        node = await self.rig.node(sim_engine(SimEngineConfig(name, role, **options)), name)

        async def find() -> tuple[str, ...]:
            return self.router.addresses

        reporter = Reporter(Identity("engine", name), node.server, find)
        reporter.start()
        self.reporters.append(reporter)
        await until(lambda: self.role(name) is not None, f"{name} at the router")
        return node

    def role(self, name: str) -> Role | None:
        worker = self.router.dispatcher.state.worker(name)
        return None if worker is None else worker.role


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    dispatcher = Dispatcher(DispatchConfig(), prefill_policy("round_robin"), decode_policy("round_robin"))
    router = RouterServer(Identity("router", "r"), dispatcher)
    await router.start([f"unix:{tmp_path}/router.sock"])
    async with Rig(tmp_path) as rig:
        made = Cluster(tmp_path, rig, router)
        yield made
        for reporter in made.reporters:
            await reporter.stop()
        await router.stop()


async def order(cluster: Cluster, name: str, role: Any) -> None:
    channel = cluster.router.engines.channel(name)
    assert channel is not None
    channel.send(SetRole(role))
    await until(lambda: cluster.role(f"{name}") == role, f"{name} as {role}")


async def test_work_under_way_stays_and_the_new_role_is_announced_after_a_reconnect(cluster: Cluster) -> None:
    p, d = await cluster.engine("p", "prefill"), await cluster.engine("d", "decode")
    done = await p.prefilled("r", PROMPT)
    d.client.decode("s", PROMPT, max_tokens=2000)
    await until(lambda: d.client.outs("s"), "first token")
    await order(cluster, "d", "prefill")
    await order(cluster, "p", "decode")
    assert p.engine.status().leases == 1
    assert p.server.info().home_role == "prefill" and d.server.info().home_role == "decode"
    # the stream goes on, and the engines do the work of both roles
    so_far = len(d.client.outs("s"))
    await until(lambda: len(d.client.outs("s")) > so_far, "more tokens")
    d.client.decode("r", PROMPT, done.handle)
    await d.client.text("r")
    assert (await d.prefilled("q", [1, *PROMPT])).prompt_tokens == 51
    d.client.cancel("s")
    channel = cluster.router.engines.channel("d")
    assert channel is not None
    channel.close("test")
    await until(lambda: cluster.router.engines.channel("d") is not channel, "d is back")
    assert cluster.role("d") is Role.PREFILL
    await order(cluster, "d", "decode")
    assert d.server.info().home_role is None


async def test_ranks_switch_together(cluster: Cluster) -> None:
    ranks = await cluster.rig.node(sim_engine(SimEngineConfig("e", "decode", dp_ranks=2)), "e")
    ranks.engine.set_role("prefill")
    info = ranks.server.info()
    assert (info.role, info.home_role, info.dp_ranks) == ("prefill", "decode", 2)


async def test_an_idle_engine_is_lent_to_a_busy_role_and_called_home(cluster: Cluster) -> None:
    await cluster.engine("p", "prefill")
    d0, _ = await cluster.engine("d0", "decode"), await cluster.engine("d1", "decode")
    server = cluster.router
    config = RoleSwitchConfig(switch_s=0.05, after_s=0.0)
    roles = Roles(server.dispatcher, server.engines, config, EAGER)
    roles.look()
    assert roles.switches == 0  # nobody is busy
    p = cluster.rig.nodes[0]
    # 400 steps of the engine's whole budget
    for n in range(40):
        p.client.prefill(f"r{n}", [n + 1] * 8000)

    async def looked(role: Role) -> None:
        for _ in range(1000):
            roles.look()
            if Role.PREFILL in (cluster.role("d0"), cluster.role("d1")) and role is Role.PREFILL:
                return
            if cluster.role("d0") is cluster.role("d1") is Role.DECODE and role is Role.DECODE:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"no switch to {role}")

    await looked(Role.PREFILL)
    assert roles.switches >= 1
    for n in range(40):
        p.client.cancel(f"r{n}")
        p.client.release(f"r{n}")
    await p.rests()
    await looked(Role.DECODE)
    assert d0.at_rest()
