"""The router's side of an autoscaler, over real sockets: orders, questions, and which of two is obeyed."""

import asyncio
import json
import math
from pathlib import Path

import pytest

from actors.router import autoscaler as sides
from actors.router.forecasts import Forecasts, PredictorConfig
from actors.router.server import RouterServer
from actors.scaling.server import observation_of
from actors.wire import messages as wire
from actors.wire.channel import Channel, Identity
from actors.wire.sockets import connect
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.scaling.observation import Duty, Observation
from policies.state.views import Role
from tests.actors.router.test_server import Peer, engine, peer, serving, until


async def autoscaler(router: RouterServer, generation: int = 0, name: str = "a") -> Peer:
    inbox: list[wire.Message] = []
    me = Identity("autoscaler", name, generation=generation)
    return Peer(await connect(router.addresses, lambda: Channel(me, lambda c, m: inbox.append(m))), inbox)


async def observed(a: Peer, of: int) -> tuple[Observation, int]:
    """Returns the next observation of a fleet of `of` engines, and the rows that its capacity is fitted to."""
    while True:
        message = await a.get(wire.FleetObserved)
        assert isinstance(message, wire.FleetObserved)
        seen = observation_of(message)
        if len(seen.engines) == of:
            return seen, message.fitted_rows


async def closed(channel: Channel) -> str:
    async with asyncio.timeout(60):
        return await channel.closed


async def test_it_sees_every_engine_and_what_waits(router: RouterServer) -> None:
    _, _, i = await serving(router)
    await engine(router, "w", "decode")
    i.channel.send(wire.Submit("r-1", prompt_tokens=10, max_tokens=4))
    await i.get(wire.RoutePrefill)
    a = await autoscaler(router)
    seen, rows = await observed(a, 3)
    assert [(e.engine, e.role, e.duty) for e in seen.engines] == [
        ("d", Role.DECODE, Duty.ACTIVE), ("p", Role.PREFILL, Duty.ACTIVE), ("w", Role.DECODE, Duty.ACTIVE),
    ]  # fmt: skip
    # nothing was measured, and no window is complete
    assert (rows, seen.windows, seen.queued, seen.pooled) == (0, None, 0, 0)
    assert (seen.capability.slots, seen.capability.kv_tokens) == (2, 1600)
    # the prefill engine has two slots: a third prompt waits
    for name in ("r-2", "r-3"):
        i.channel.send(wire.Submit(name, prompt_tokens=10, max_tokens=4))
    await until(lambda: router.dispatcher.queue_size == 1)
    while not seen.queued:
        seen, _ = await observed(a, 3)
    assert (seen.queued, seen.oldest_queued_s >= 0.0) == (1, True)


async def test_its_orders_reach_the_engine_and_what_came_of_them_is_seen(router: RouterServer) -> None:
    _, d, _ = await serving(router)
    a = await autoscaler(router)
    a.channel.send(wire.Assign("d", "prefill", "warm"))
    a.channel.send(wire.Assign("nobody", "prefill", "active"))
    order = await d.get(wire.SetRole)
    assert order == wire.SetRole("prefill", "warm", lent=False)
    (info,) = [info for info in router.engines.infos() if info.id == "d"]
    d.channel.send(wire.Announce(wire.EngineInfo(*_facts(info, "prefill"), duty="warm"), 5.0))
    seen, _ = await observed(a, 2)
    while seen.engines[0].duty is not Duty.WARM:
        seen, _ = await observed(a, 2)
    assert seen.engines[0].role is Role.PREFILL
    # the engine says for how long it has been so
    assert 4.9 < seen.now_s - seen.engines[0].since_s < 60.0
    assert router.status().totals["assignments"] == 1


async def test_an_engine_that_joins_warm_is_seen_before_an_observation_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that joins warm has started for a plan that waits for it. Several together are one observation."""
    monkeypatch.setattr("actors.router.server.STATUS_S", 3600.0)
    policy = JoinShortestQueue()
    router = RouterServer(Identity("router", "r"), Dispatcher(DispatchConfig(), policy, policy), 0.1)
    await router.start([f"unix:{tmp_path}/own.sock"])
    side, seen, observe = router._autoscaler, [], router._autoscaler.observe

    def observed_early() -> None:
        seen.append([info.id for info in router.engines.infos()])
        observe()

    monkeypatch.setattr(side, "observe", observed_early)

    async def joins(name: str, duty: wire.Duty) -> Peer:
        e = await peer(router, "engine", name)
        facts = ("decode", "sim", "m", "g", ("unix:/x",), 2, 100, 16, 1024, "n", 1, 30.0)
        e.channel.send(wire.Announce(wire.EngineInfo(name, *facts, duty=duty)))  # type: ignore[arg-type]
        await until(lambda: router.engines.channel(name) is not None)
        return e

    try:
        # without an autoscaler nobody waits
        await joins("early", "warm")
        a = await autoscaler(router)
        await until(lambda: side.connected)
        await joins("active", "active")
        # the first observation shows a whole fleet, and no engine that happens to be the first to join
        await joins("first", "warm")
        assert seen == []
        # what is due comes, and with it the next one that is not
        side.observe()
        w = await joins("w", "warm")
        await joins("x", "warm")
        assert seen[1:] == [["active", "early", "first", "w"]]
        # one that is known tells nothing new
        (info,) = [info for info in router.engines.infos() if info.id == "w"]
        side.observe()
        w.channel.send(wire.Announce(info, duty_for_s=5000.0))
        since_s = router.engines.duty_since_s("w")
        await until(lambda: router.engines.duty_since_s("w") != since_s)
        assert len(seen) == 3
        message = await a.get(wire.FleetObserved)
        assert isinstance(message, wire.FleetObserved)
        assert len(observation_of(message).engines) == 3
    finally:
        await router.stop()


def _facts(info: wire.EngineInfo, role: wire.Role) -> tuple[object, ...]:
    return (
        info.id, role, info.kind, info.model, info.group, info.addresses, info.slots, info.kv_blocks,
        info.block_size_tokens, info.max_model_len, info.node, info.pid, info.lease_s,
    )  # fmt: skip


async def test_it_learns_how_long_activations_and_switches_take_and_how_engines_started(
    router: RouterServer,
) -> None:
    _, d, _ = await serving(router)
    a = await autoscaler(router)
    seen, _ = await observed(a, 2)
    guess = seen.leads

    async def obeys(role: wire.Role, duty: wire.Duty, started: wire.Started | None = None) -> Observation:
        (info,) = [info for info in router.engines.infos() if info.id == "d"]
        sent = router._autoscaler.assignments
        a.channel.send(wire.Assign("d", role, duty))
        await until(lambda: router._autoscaler.assignments > sent)
        # the order is given again in every round; it counts from the first time
        a.channel.send(wire.Assign("d", role, duty))
        await asyncio.sleep(0.05)
        facts = _facts(info, role)
        d.channel.send(wire.Announce(wire.EngineInfo(*facts, duty=duty, started=started), 0.0))
        seen, _ = await observed(a, 2)
        while (seen.engines[0].role.value, seen.engines[0].duty.value) != (role, duty):
            seen, _ = await observed(a, 2)
        return seen

    assert (await obeys("decode", "warm")).leads == guess
    leads = (await obeys("decode", "active")).leads
    assert 0.05 <= leads.activate_s < 60.0
    assert leads.activate_s != guess.activate_s
    assert (leads.switch_s, leads.start_s) == (guess.switch_s, guess.start_s)
    leads = (await obeys("prefill", "active", wire.Started(5.0, 1.0, 2.0, 3.0, 0.5))).leads
    assert 0.05 <= leads.switch_s < 60.0
    assert leads.switch_s != guess.switch_s
    told = await a.get(wire.FleetObserved)
    while not told.starts:  # type: ignore[attr-defined]
        told = await a.get(wire.FleetObserved)
    assert told.starts == {"d": wire.Started(5.0, 1.0, 2.0, 3.0, 0.5)}  # type: ignore[attr-defined]


async def test_an_order_that_is_lost_and_not_given_again_is_not_timed_by_the_same_order_later(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hours in between would be the lead of an activation."""
    monkeypatch.setattr(sides, "GIVEN_AGAIN_S", 0.5)
    _, d, _ = await serving(router)
    a = await autoscaler(router)
    a.channel.send(wire.Assign("d", "decode", "warm"))
    await d.get(wire.SetRole)
    assert set(router._autoscaler._sent) == {"d"}
    await until(lambda: not router._autoscaler._sent)
    assert router.engines.channel("d") is not None


async def test_an_order_to_an_engine_that_dies_with_it_is_forgotten(router: RouterServer) -> None:
    _, d, _ = await serving(router)
    a = await autoscaler(router)
    a.channel.send(wire.Assign("d", "prefill", "active"))
    await d.get(wire.SetRole)
    assert set(router._autoscaler._sent) == {"d"}
    d.channel.close()
    await until(lambda: router.engines.channel("d") is None)
    await until(lambda: not router._autoscaler._sent)


async def test_the_ages_of_engines_go_with_the_attempts_that_they_serve(router: RouterServer) -> None:
    _, _, i = await serving(router)
    await autoscaler(router)
    await until(lambda: router._autoscaler._observer is not None)
    assert router._autoscaler._observer is not None
    ages = router._autoscaler._observer._ages._ages
    for attempt_id in ("r-1", "r-2", "r-3"):
        i.channel.send(wire.Submit(attempt_id, prompt_tokens=10, max_tokens=4))
    await i.get(wire.RoutePrefill, lambda m: m.attempt_id == "r-2")  # type: ignore[attr-defined]
    # the third one waits at the router
    assert set(ages) == {"r-1", "r-2"}
    i.channel.send(wire.Closed("r-1", "cancelled", 0))
    await until(lambda: set(ages) == {"r-2", "r-3"})
    i.channel.close()
    await until(lambda: not ages)


class NoNumber(Forecasts):
    """Predictors whose forecast is not a number."""

    def arrived(self, submit: wire.Submit, now_s: float, wanted: bool = False) -> float | None:
        return math.nan


async def test_a_request_whose_forecast_is_no_number_is_decided_and_the_fault_is_counted(
    router: RouterServer,
) -> None:
    _, _, i = await serving(router)
    await autoscaler(router)
    await until(lambda: router._autoscaler._observer is not None)
    assert router._autoscaler._observer is not None
    router._autoscaler._observer._from_s = 0.0
    router._forecasts = NoNumber(PredictorConfig(enabled=True))
    i.channel.send(wire.Submit("r-1", prompt_tokens=10, max_tokens=4))
    await i.get(wire.RoutePrefill)
    assert i.channel.open
    assert router.status().totals["internal_errors"] == 1


async def test_what_it_has_learned_is_shown_while_it_is_connected(router: RouterServer) -> None:
    a = await autoscaler(router)
    a.channel.send(wire.LeadsTold({"lead_seconds_start": 42.0}))
    await until(lambda: router.status().gauges.get("lead_seconds_start") == 42.0)
    a.channel.close("killed")
    await until(lambda: "lead_seconds_start" not in router.status().gauges)


async def test_a_later_one_replaces_an_earlier_one_which_is_refused_from_then_on(
    router: RouterServer,
) -> None:
    _, d, _ = await serving(router)
    first, second = await autoscaler(router, 3, "a"), await autoscaler(router, 4, "b")
    await closed(first.channel)
    again = await autoscaler(router, 3, "a")
    await closed(again.channel)
    second.channel.send(wire.Assign("d", "decode", "warm"))
    assert (await d.get(wire.SetRole)).duty == "warm"  # type: ignore[attr-defined]
    # one that comes back with its own generation is the same
    back = await autoscaler(router, 4, "b")
    await closed(second.channel)
    back.channel.send(wire.Assign("d", "decode", "active"))
    assert (await d.get(wire.SetRole)).duty == "active"  # type: ignore[attr-defined]


async def test_a_new_router_refuses_an_earlier_one_that_comes_before_the_latest(tmp_path: Path) -> None:
    """The latest one of the application has generation 4, and the one before it lives on and is the first to come."""
    policy = JoinShortestQueue()
    dispatcher = Dispatcher(DispatchConfig(), policy, policy)
    router = RouterServer(Identity("router", "r"), dispatcher, 0.1, autoscaler_generation=4)
    await router.start([f"unix:{tmp_path}/own.sock"])
    try:
        d, i = await engine(router, "d", "decode"), await peer(router, "ingress", "i")
        earlier = await autoscaler(router, 3, "a")
        earlier.channel.send(wire.Standby("asleep", ("decode",), 30.0))
        earlier.channel.send(wire.Assign("d", "decode", "warm"))
        await closed(earlier.channel)
        assert not [m for m in earlier.inbox if isinstance(m, wire.FleetObserved)]
        assert (router._autoscaler.connected, router._autoscaler.standby) == (False, None)
        latest = await autoscaler(router, 4, "b")
        latest.channel.send(wire.Assign("d", "prefill", "active"))
        assert await d.get(wire.SetRole) == wire.SetRole("prefill", "active", lent=False)
        i.channel.send(wire.Admin(1, "scale", b"{}"))
        await latest.get(wire.ScaleAsked)
    finally:
        await router.stop()


async def test_an_earlier_one_is_obeyed_when_the_later_one_has_been_away_for_long(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second replica was started by mistake, say, and Serve stopped it again, which it does with the newest one."""
    _, d, _ = await serving(router)
    first, second = await autoscaler(router, 3, "a"), await autoscaler(router, 4, "b")
    await closed(first.channel)
    second.channel.close("stopped")
    await until(lambda: not router._autoscaler.connected)
    await closed((await autoscaler(router, 3, "a")).channel)
    # one that was never given a generation is no reason to obey an earlier one
    unknown = await autoscaler(router, 0, "c")
    await until(lambda: router._autoscaler.connected)
    await closed((await autoscaler(router, 3, "a")).channel)
    unknown.channel.close("stopped")
    await until(lambda: not router._autoscaler.connected)
    monkeypatch.setattr(sides, "GONE_S", 0.0)
    back = await autoscaler(router, 3, "a")
    back.channel.send(wire.Assign("d", "decode", "warm"))
    assert (await d.get(wire.SetRole)).duty == "warm"  # type: ignore[attr-defined]
    # of those that are connected the later one is obeyed, as ever
    await closed((await autoscaler(router, 2, "0")).channel)
    later = await autoscaler(router, 4, "b")
    await closed(back.channel)
    later.channel.send(wire.Assign("d", "decode", "active"))
    assert (await d.get(wire.SetRole)).duty == "active"  # type: ignore[attr-defined]


@pytest.mark.parametrize("there", [True, False])
async def test_a_fleet_whose_autoscaler_is_gone_is_awake_when_an_engine_that_decodes_serves(
    router: RouterServer, there: bool
) -> None:
    """The autoscaler was turned off, say, and a deploy has started the configured engines."""
    i = await peer(router, "ingress", "i")
    a = await autoscaler(router)
    a.channel.send(wire.Standby("asleep", ("prefill", "decode"), 30.0))
    await i.get(wire.Fleet, lambda m: m.standby is not None)  # type: ignore[attr-defined]
    if not there:
        a.channel.close("turned off")
        await until(lambda: not router._autoscaler.connected)
    await engine(router, "p", "prefill")
    await until(lambda: len(router.engines.infos()) == 1)
    router._look_after_roles()
    # an engine that only computes prompts answers nobody
    assert router._autoscaler.standby is not None and router._autoscaler.standby.phase == "asleep"
    await engine(router, "d", "decode")
    await until(lambda: len(router.engines.infos()) == 2)
    router._look_after_roles()
    assert router._autoscaler.standby.phase == ("asleep" if there else "awake")
    if not there:
        awake = wire.Standby("awake", ("prefill", "decode"), 30.0)
        await i.get(wire.Fleet, lambda m: m.standby == awake)  # type: ignore[attr-defined]


async def test_the_generation_of_an_autoscaler_is_none_of_a_router(router: RouterServer) -> None:
    await autoscaler(router, 99)
    i = await peer(router, "ingress", "i")
    assert router.me.generations.highest == 0
    await i.get(wire.Fleet)
    assert i.channel.open


async def test_a_question_goes_to_the_autoscaler_and_its_answer_to_the_asker(router: RouterServer) -> None:
    _, _, i = await serving(router)
    other = await peer(router, "ingress", "j")
    i.channel.send(wire.Admin(7, "scale", b"{}"))
    answer = await i.get(wire.AdminAnswer)
    assert (answer.ask, answer.status) == (7, 404)  # type: ignore[attr-defined]
    assert "scaling" in json.loads(answer.body)["message"]  # type: ignore[attr-defined]
    a = await autoscaler(router)
    await until(lambda: router._autoscaler.connected)
    i.channel.send(wire.Admin(8, "scale", b'{"decode":2}'))
    other.channel.send(wire.Admin(8, "scale", b"{}"))
    asked = [await a.get(wire.ScaleAsked), await a.get(wire.ScaleAsked)]
    for question in reversed(asked):
        assert isinstance(question, wire.ScaleAsked)
        a.channel.send(wire.ScaleAnswered(question.id, 200, question.body))
    assert await i.get(wire.AdminAnswer) == wire.AdminAnswer(8, 200, b'{"decode":2}')
    assert await other.get(wire.AdminAnswer) == wire.AdminAnswer(8, 200, b"{}")
    a.channel.send(wire.ScaleAnswered(99, 200, b"{}"))
    i.channel.send(wire.Admin(9, "scale"))
    await a.get(wire.ScaleAsked)
    a.channel.close("killed")
    assert (await i.get(wire.AdminAnswer)).status == 503  # type: ignore[attr-defined]
    assert not router._autoscaler._questions


async def test_questions_are_bounded_and_end_with_their_asker(router: RouterServer) -> None:
    _, _, i = await serving(router)
    await autoscaler(router)
    await until(lambda: router._autoscaler.connected)
    for ask in range(65):
        i.channel.send(wire.Admin(ask, "scale"))
    assert (await i.get(wire.AdminAnswer)).ask == 0  # type: ignore[attr-defined]
    i.channel.close("gone")
    await until(lambda: not router._autoscaler._questions)


async def test_nobody_but_an_autoscaler_gives_orders(router: RouterServer) -> None:
    _, d, i = await serving(router)
    i.channel.send(wire.Assign("d", "decode", "warm"))
    await closed(i.channel)
    assert not [m for m in d.inbox if isinstance(m, wire.SetRole)]
