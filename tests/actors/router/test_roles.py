"""A router has an engine serve another role, over real sockets, with sim engines."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.engine.report import Reporter
from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.ranks import sim_engine
from actors.router.clock import clock_s
from actors.router.roles import Roles
from actors.router.server import RouterServer
from actors.wire.channel import Channel, Identity
from actors.wire.messages import EngineInfo, SetRole
from actors.wire.sockets import connect
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.routing.flowkv.regimes import RegimeThresholds
from policies.routing.flowkv.role_switch import RoleSwitchConfig
from policies.routing.registry import decode_policy, prefill_policy
from policies.state.views import Health, Role
from tests.actors.engine.rig import Node, Rig, until

PROMPT = list(range(10, 60))
# every engine with work is busy, and lent at the next look; one without work is idle
EAGER = RegimeThresholds(prefill_low=0.01, prefill_high=100.0, decode_low=0.01, decode_high=100.0, idle=0.005)


class Cluster:
    def __init__(self, directory: Path, rig: Rig, router: RouterServer) -> None:
        self.directory, self.rig, self.router = directory, rig, router
        self.reporters: list[Reporter] = []

    async def engine(self, name: str, role: Any, duty: Any = "active", **options: Any) -> Node:
        node = await self.rig.node(sim_engine(SimEngineConfig(name, role, **options)), name, duty=duty)

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
    channel.send(SetRole(role, lent=True))
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
    # on a busy machine a short grace could pass before the engine is back
    cluster.router.engines._grace_s = 600.0
    channel = cluster.router.engines.channel("d")
    assert channel is not None
    channel.close("test")
    await until(lambda: cluster.router.engines.channel("d") is not channel, "d is back")
    assert cluster.role("d") is Role.PREFILL
    await order(cluster, "d", "decode")
    assert d.server.info().home_role is None


async def duty(cluster: Cluster, name: str, *order: Any) -> EngineInfo:
    """Gives an engine an order and returns what it announces then."""
    channel = cluster.router.engines.channel(name)
    assert channel is not None
    channel.send(SetRole(*order))
    await until(lambda: announced(cluster, name)[:2] == order[:2], f"{name} as {order}")
    (info,) = [info for info in cluster.router.engines.infos() if info.id == name]
    return info


async def test_an_engine_is_active_since_it_was_ready_activated_or_switched_and_not_since_it_was_made_warm(
    cluster: Cluster,
) -> None:
    node = await cluster.engine("d", "decode")
    begun_s = node.server._active_since_s
    for order, begins in (
        (("decode", "warm"), False),
        (("decode", "active"), True),
        (("prefill", "active"), True),
        (("prefill", "warm"), False),
    ):
        await duty(cluster, "d", *order)
        before_s, begun_s = begun_s, node.server._active_since_s
        assert (begun_s > before_s) == begins
        # the router knows it by its own clock
        told_s = cluster.router.engines.active_since_s("d")
        assert told_s is not None
        assert told_s == pytest.approx(clock_s() - node.server.active_for_s, abs=5.0)
    assert cluster.router.engines.active_since_s("nobody") is None


def announced(cluster: Cluster, name: str) -> tuple[str, str]:
    (info,) = [info for info in cluster.router.engines.infos() if info.id == name]
    return info.role, info.duty


async def test_a_warm_engine_gets_nothing_and_keeps_duty_and_role_over_a_reconnect(cluster: Cluster) -> None:
    w = await cluster.engine("w", "prefill", duty="warm")
    worker = cluster.router.dispatcher.state.worker("w")
    assert worker is not None and worker.health is Health.WARM
    for order, health in ((("decode", "warm"), Health.WARM), (("decode", "active"), Health.READY)):
        info = await duty(cluster, "w", *order)
        assert info.home_role is None
        old = cluster.router.engines.channel("w")
        assert old is not None
        old.close("test")
        await until(lambda: cluster.router.engines.channel("w") is not old, "w is back")  # noqa: B023
        await until(lambda: cluster.role("w") is Role.DECODE, "w as decode")
        worker = cluster.router.dispatcher.state.worker("w")
        assert worker is not None and worker.health is health
        # a report says the same
        cluster.router.engines.reported(w.server.status())
        worker = cluster.router.dispatcher.state.worker("w")
        assert worker is not None and worker.health is health


async def test_a_lent_engine_that_is_given_a_role_for_good_has_no_other_home(cluster: Cluster) -> None:
    await cluster.engine("e", "decode")
    assert (await duty(cluster, "e", "prefill", "active", True)).home_role == "decode"
    assert (await duty(cluster, "e", "prefill", "warm", False)).home_role is None
    assert (await duty(cluster, "e", "decode", "active", True)).home_role == "prefill"


async def test_a_deactivated_engine_ends_its_work_where_it_is(cluster: Cluster) -> None:
    d = await cluster.engine("d", "decode")
    d.client.decode("s", PROMPT, max_tokens=40)
    await until(lambda: d.client.outs("s"), "first token")
    await duty(cluster, "d", "decode", "warm")
    await d.client.text("s")
    # what the router sent before it knew is served, too
    d.client.decode("t", PROMPT, max_tokens=3)
    await d.client.text("t")
    assert d.at_rest()


async def test_ranks_switch_together(cluster: Cluster) -> None:
    ranks = await cluster.rig.node(sim_engine(SimEngineConfig("e", "decode", dp_ranks=2)), "e")
    ranks.server.set_role("prefill", "active", lent=True)
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


async def test_without_loans_no_snapshot_is_made_but_an_engine_that_an_earlier_router_lent_is_called_home(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.engine("p", "prefill")
    d = await cluster.engine("d", "decode")
    server = cluster.router
    roles = Roles(server.dispatcher, server.engines, RoleSwitchConfig(), EAGER)
    seen: list[Any] = []
    plain = server.dispatcher.state.snapshot

    def snapshot(*args: Any, **named: Any) -> Any:
        seen.append(args)
        return plain(*args, **named)

    monkeypatch.setattr(
        type(server.dispatcher.state), "snapshot", lambda _, *args, **named: snapshot(*args, **named)
    )
    roles.look()
    assert not seen
    await order(cluster, "d", "prefill")
    seen.clear()
    roles.look()
    assert seen
    await until(lambda: cluster.role("d") is Role.DECODE, "d called home")
    assert (roles.switches, d.server.info().home_role) == (1, None)
    seen.clear()
    roles.look()
    assert not seen


async def test_an_order_to_an_engine_whose_connection_is_closed_is_not_counted(cluster: Cluster) -> None:
    await cluster.engine("p", "prefill")
    await cluster.engine("d", "decode")
    server = cluster.router
    await order(cluster, "d", "prefill")
    roles = Roles(server.dispatcher, server.engines, RoleSwitchConfig(), EAGER)
    channel = server.engines.channel("d")
    assert channel is not None
    channel.open = False
    roles.look()
    assert roles.switches == 0
    channel.open = True
    roles.look()
    assert roles.switches == 1


async def test_while_an_autoscaler_is_connected_the_router_lends_nothing(cluster: Cluster) -> None:
    """An engine that was lent before stays, until the autoscaler gives it a role or goes."""
    d = await cluster.engine("d", "decode")
    await order(cluster, "d", "prefill")
    me = Identity("autoscaler", "a")
    channel = await connect(cluster.router.addresses, lambda: Channel(me, lambda c, m: None))
    await until(lambda: cluster.router._autoscaler.connected, "an autoscaler")
    for _ in range(3):
        cluster.router._look_after_roles()
        await asyncio.sleep(0.05)
    assert (cluster.role("d"), cluster.router._roles.switches) == (Role.PREFILL, 0)
    channel.close("gone")
    await until(lambda: not cluster.router._autoscaler.connected, "no autoscaler")
    cluster.router._look_after_roles()
    await until(lambda: cluster.role("d") is Role.DECODE, "d called home")
    assert d.server.info().home_role is None
