"""The router over real sockets: decisions reach the owner, and whatever a connection held ends with it."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from actors import no_memory
from actors.router import server as module
from actors.router.clock import clock_s
from actors.router.server import RouterServer
from actors.wire import messages as wire
from actors.wire.channel import Channel, Identity
from actors.wire.sockets import connect
from policies.admission.registry import DEFAULT
from policies.dispatch.dispatcher import Action
from policies.dispatch.gate import REMEMBERS_S
from policies.request.terms import Terms
from policies.routing.simple.join_shortest_queue import JoinShortestQueue
from policies.state import events as ev
from policies.state.views import Request, Role


class Peer:
    """A connected peer that keeps what it received."""

    def __init__(self, channel: Channel, inbox: "list[wire.Message]") -> None:
        self.channel, self.inbox = channel, inbox

    async def get(self, kind: type, where: Callable[[object], bool] = lambda m: True) -> object:
        """Returns the next message of a kind; fails after 60 s."""
        async with asyncio.timeout(60):
            while True:
                for message in self.inbox:
                    if isinstance(message, kind) and where(message):
                        self.inbox.remove(message)
                        return message
                await asyncio.sleep(0.005)


async def peer(router: RouterServer, kind: str, name: str) -> Peer:
    inbox: list[wire.Message] = []
    channel = await connect(
        router.addresses,
        lambda: Channel(Identity(kind, name), lambda c, m: inbox.append(m)),  # type: ignore[arg-type]
    )
    return Peer(channel, inbox)


async def engine(router: RouterServer, name: str, role: str) -> Peer:
    e = await peer(router, "engine", name)
    e.channel.send(
        wire.Announce(
            wire.EngineInfo(name, role, "sim", "m", "g", ("unix:/x",), 2, 100, 16, 1024, "n", 1, 30.0)  # type: ignore[arg-type]
        )
    )
    e.channel.send(wire.Status(name, 0, 0, 0, 0, 0.0))
    return e


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def serving(router: RouterServer) -> tuple[Peer, Peer, Peer]:
    p, d = await engine(router, "p", "prefill"), await engine(router, "d", "decode")
    await until(lambda: len(router.status().statuses) == 2)
    return p, d, await peer(router, "ingress", "i")


async def test_a_new_ingress_learns_the_fleet_and_hears_of_changes(router: RouterServer) -> None:
    _, d, i = await serving(router)
    fleet = await i.get(wire.Fleet)
    assert isinstance(fleet, wire.Fleet)
    assert [e.id for e in fleet.engines] == ["d", "p"]
    d.channel.abort("killed")
    draining = await i.get(wire.Fleet)
    assert [(e.id, e.state) for e in draining.engines] == [("d", "draining"), ("p", "ready")]  # type: ignore[attr-defined]
    gone = await i.get(wire.Fleet)
    assert [e.id for e in gone.engines] == ["p"]  # type: ignore[attr-defined]


async def test_an_engine_that_only_lost_its_link_stays_in_the_fleet(router: RouterServer) -> None:
    _, d, i = await serving(router)
    await i.get(wire.Fleet)
    # on a busy machine a short grace could pass before the engine is back
    router.engines._grace_s = 600.0
    d.channel.abort("link lost")
    await i.get(wire.Fleet, lambda f: any(e.state == "draining" for e in f.engines))  # type: ignore[attr-defined]
    forget = router.engines._engines["d"].forget
    await engine(router, "d", "decode")
    back = await i.get(wire.Fleet)
    assert [(e.id, e.state) for e in back.engines] == [("d", "ready"), ("p", "ready")]  # type: ignore[attr-defined]
    # the first connection's timer must not forget the second
    assert forget is not None and forget.cancelled()


@pytest.mark.parametrize(
    "unknown", [["Nonsense", "x"], ["Progress", [["x", "admitted", 0]]], ["Cancel", "x"]]
)
async def test_a_message_that_the_router_cannot_take_ends_its_connection_and_is_counted(
    router: RouterServer, unknown: list[object]
) -> None:
    """The cases are a kind that does not exist, a shape that does not, and a kind that only engines take."""
    _, _, i = await serving(router)
    assert router.status().totals["protocol_errors"] == 0
    frame = msgspec.msgpack.encode([unknown])
    assert i.channel._transport is not None
    i.channel._transport.write(len(frame).to_bytes(4, "big") + frame)
    async with asyncio.timeout(60):
        await i.channel.closed
    assert router.status().totals["protocol_errors"] == 1


async def test_submit_prefilled_closed(router: RouterServer) -> None:
    _, _, i = await serving(router)
    i.channel.send(wire.Submit("x", prompt_tokens=10, max_tokens=4))
    route = await i.get(wire.RoutePrefill)
    assert (route.attempt_id, route.engine_id, route.colocated) == ("x", "p", False)  # type: ignore[attr-defined]
    i.channel.send(wire.PrefillReported("x", 30.0, 1, 0))
    assert (await i.get(wire.RouteDecode)).engine_id == "d"  # type: ignore[attr-defined]
    i.channel.send(wire.Progress(["x"], [wire.Grown("x", 3)]))
    i.channel.send(wire.Closed("x", "finished", 3))
    await until(lambda: router.status().in_flight == 0)
    assert router.status().leases == 0
    assert [d["action"] for d in router.decisions.explain("x")] == ["RoutePrefill", "RouteDecode"]


async def test_a_clock_that_is_set_expires_nothing(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, i = await serving(router)
    for n in range(router.dispatcher.config.max_prefills + 1):
        i.channel.send(wire.Submit(f"x{n}", prompt_tokens=10, max_tokens=4))
    await until(lambda: router.status().queued >= 1)
    before_s = time.time()
    monkeypatch.setattr(time, "time", lambda: before_s + 3600.0)  # a suspended machine resumes
    await asyncio.sleep(0.5)  # some ticks
    assert router.status().queued >= 1
    assert not [m for m in i.inbox if isinstance(m, wire.Reject)]


async def test_a_lost_ingress_leaves_nothing(router: RouterServer) -> None:
    _, _, i = await serving(router)
    for n in range(200):
        i.channel.send(wire.Submit(f"x{n}", prompt_tokens=10, max_tokens=4))
    await until(lambda: router.status().in_flight == 200)
    i.channel.send(wire.PrefillReported("x0", 30.0, 1, 0))
    await until(lambda: router.status().leases == 1)
    i.channel.abort("killed")
    await until(lambda: router.status().in_flight == 0)
    status = router.status()
    assert (status.queued, status.pool, status.leases) == (0, 0, 0)
    workers = router.dispatcher.state.snapshot(0).workers.values()
    assert all(w.slots_used == w.kv_tokens == w.prefilling == 0 for w in workers)


async def test_a_rejected_attempt_is_followed_until_its_ingress_is_lost(router: RouterServer) -> None:
    """An ingress tells the times of an attempt after its rejection, and does not if it is lost before."""
    i = await peer(router, "ingress", "i")
    place = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    i.channel.send(wire.Submit("a", prompt_tokens=10, max_tokens=4, trace=place))
    await i.get(wire.Reject)
    assert router._following
    i.channel.abort("gone")
    await until(lambda: not len(router._ingresses))
    assert not router._following


async def test_no_engine_is_a_rejection_with_retry_after(router: RouterServer) -> None:
    i = await peer(router, "ingress", "i")
    i.channel.send(wire.Submit("x", prompt_tokens=10, max_tokens=4))
    reject = await i.get(wire.Reject)
    assert (reject.status, reject.reason) == (503, "no_engine")  # type: ignore[attr-defined]
    assert router.status().in_flight == 0


async def test_a_restarted_router_adopts_what_an_ingress_has_under_way(router: RouterServer) -> None:
    _, _, i = await serving(router)
    submit = wire.Submit("x", prompt_tokens=10, max_tokens=4)
    i.channel.send(wire.Adopt(submit, "decoding", None, "d", tokens=2))
    await until(lambda: router.dispatcher.state.snapshot(0).workers["d"].slots_used == 1)
    i.channel.send(wire.Closed("x", "finished", 4))
    await until(lambda: router.dispatcher.state.snapshot(0).workers["d"].slots_used == 0)


async def test_a_message_that_a_router_does_not_take_ends_only_that_connection(router: RouterServer) -> None:
    _, _, i = await serving(router)
    other = await peer(router, "ingress", "rude")
    other.channel.send(wire.Tokens([]))
    await other.channel.closed
    i.channel.send(wire.Submit("x", prompt_tokens=10, max_tokens=4))
    assert (await i.get(wire.RoutePrefill)).attempt_id == "x"  # type: ignore[attr-defined]


STRANGE_ENGINE = wire.EngineInfo("x", "decode", "sim", "m", "g", ("unix:/x",), 9, 9, 16, 64, "n", 1, 30.0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ingress", wire.Announce(STRANGE_ENGINE)),
        ("ingress", wire.Status("d", 2, 0, 0, 0, 0.0, state="draining")),
        ("engine", wire.Submit("x", prompt_tokens=10, max_tokens=4)),
        ("engine", wire.Closed("a", "cancelled")),
        ("engine", wire.Admin(1, "policy")),
        ("router", wire.Announce(STRANGE_ENGINE)),
        ("router", wire.Submit("x", prompt_tokens=10, max_tokens=4)),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
async def test_each_kind_of_peer_may_send_only_its_own_messages(
    router: RouterServer, kind: str, message: wire.Message
) -> None:
    _, _, i = await serving(router)
    i.channel.send(wire.Submit("a", prompt_tokens=10, max_tokens=4))
    await i.get(wire.RoutePrefill)
    stranger = await peer(router, kind, "stranger")
    stranger.channel.send(message)
    await stranger.channel.closed
    assert router.status().totals["protocol_errors"] == 1
    assert [(e.id, e.state) for e in router.fleet().engines] == [("d", "ready"), ("p", "ready")]
    assert router.status().in_flight == 1
    assert i.channel.open


async def ranks(router: RouterServer, name: str, role: str) -> Peer:
    """Announces an engine of two ranks behind a barrier."""
    e = await peer(router, "engine", name)
    facts = (name, role, "sim", "m", "g", ("unix:/x",), 4, 200, 16, 1024, "n", 1, 30.0)
    e.channel.send(wire.Announce(wire.EngineInfo(*facts, dp_ranks=2, barrier=True)))  # type: ignore[arg-type]
    each = [wire.Status(name, 0, 0, 0, 0, 0.0)] * 2
    e.channel.send(wire.Status(name, 0, 0, 0, 0, 0.0, ranks=each))
    return e


async def test_routes_name_the_rank_and_requests_are_adopted_on_theirs(router: RouterServer) -> None:
    d = await ranks(router, "d", "colocated")
    await until(lambda: len(router.status().statuses) == 1)
    i = await peer(router, "ingress", "i")
    # the other rank has something to do already, so the shortest queue is rank 1
    i.channel.send(wire.Adopt(wire.Submit("x", 10, 4), "decoding", "d", "d", tokens=2, decode_dp_rank=0))
    i.channel.send(wire.Submit("y", 10, 4))
    route = await i.get(wire.RoutePrefill)
    assert (route.engine_id, route.dp_rank, route.colocated) == ("d", 1, True)  # type: ignore[attr-defined]
    workers = router.dispatcher.state.snapshot(0).workers
    assert {name: (w.slots_used, w.slots) for name, w in workers.items()} == {"d#0": (1, 2), "d#1": (1, 2)}
    d.channel.abort("killed")
    await until(lambda: not router.dispatcher.state.snapshot(0).workers)  # both are gone with their engine


async def test_an_engine_that_is_avoided_is_avoided_with_all_its_ranks(router: RouterServer) -> None:
    await ranks(router, "a", "colocated")
    await ranks(router, "b", "colocated")
    await until(lambda: len(router.status().statuses) == 2)
    i = await peer(router, "ingress", "i")
    for n in range(4):  # b's ranks fill up; a's stay empty
        i.channel.send(wire.Submit(f"x{n}", 10, 4, avoid=("a",)))
        assert (await i.get(wire.RoutePrefill)).engine_id == "b"  # type: ignore[attr-defined]
    workers = router.dispatcher.state.snapshot(0).workers
    assert {name: w.slots_used for name, w in workers.items()} == {"a#0": 0, "a#1": 0, "b#0": 2, "b#1": 2}


async def test_a_report_without_the_ranks_ends_that_engine_s_connection(router: RouterServer) -> None:
    d = await ranks(router, "d", "decode")
    d.channel.send(wire.Status("d", 0, 0, 0, 0, 0.0))
    await d.channel.closed


@pytest.mark.parametrize(
    "odd",
    [
        {"dp_ranks": 0},
        {"dp_ranks": -1},
        {"dp_ranks": 8},
        {"slots": 0},
        {"block_size_tokens": 0},
        {"kv_blocks": 0},
        {"id": "odd#x"},
    ],
)
async def test_an_engine_that_cannot_be_is_refused_and_leaves_nothing(
    router: RouterServer, odd: dict[str, Any]
) -> None:
    e = await peer(router, "engine", "odd")
    info = wire.EngineInfo("odd", "decode", "sim", "m", "g", ("unix:/x",), 4, 200, 16, 1024, "n", 1, 30.0)
    e.channel.send(wire.Announce(msgspec.structs.replace(info, **odd)))
    await e.channel.closed
    i = await peer(router, "ingress", "i")
    assert (await i.get(wire.Fleet)).engines == []  # type: ignore[attr-defined]
    assert not router.dispatcher.state.snapshot(0).workers


async def test_an_engine_that_comes_back_with_other_ranks_leaves_no_ghosts(router: RouterServer) -> None:
    await ranks(router, "d", "decode")
    await until(lambda: len(router.status().statuses) == 1)
    await engine(router, "d", "decode")
    await until(lambda: set(router.dispatcher.state.snapshot(0).workers) == {"d"})


@pytest.mark.parametrize("state", ["stalled", "down", "draining"])
async def test_ingresses_hear_once_of_an_engine_that_takes_no_work_and_it_gets_none(
    router: RouterServer, state: wire.EngineState
) -> None:
    p, _, i = await serving(router)
    p.channel.send(wire.Status("p", 0, 0, 0, 0, 0.0, state))
    await i.get(wire.Fleet, lambda fleet: fleet.engines[1].state == state)  # type: ignore[attr-defined]
    for _ in range(3):
        p.channel.send(wire.Status("p", 1, 0, 0, 0, 0.0, state))
    i.channel.send(wire.Submit("x", prompt_tokens=10, max_tokens=4))
    route = await i.get(wire.RoutePrefill)
    assert (route.engine_id, route.colocated) == ("d", True)  # type: ignore[attr-defined]
    await until(lambda: any(status.running == 1 for status in router.status().statuses))
    p.channel.send(wire.Status("p", 0, 0, 0, 0, 0.0))
    back = await i.get(wire.Fleet)
    assert [e.state for e in back.engines] == ["ready", "ready"]  # type: ignore[attr-defined]


@pytest.mark.pure
async def test_a_tick_that_fails_is_counted_and_followed_by_others(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, ticks = router.dispatcher.handle, 0

    def fails_once(event: ev.Event) -> list[Action]:
        nonlocal ticks
        ticks += isinstance(event, ev.Tick)
        if isinstance(event, ev.Tick) and ticks == 1:
            raise ZeroDivisionError("a bug")
        return handle(event)

    monkeypatch.setattr(router.dispatcher, "handle", fails_once)
    await until(lambda: ticks >= 2)
    assert router.status().totals["internal_errors"] == 1


@pytest.mark.pure
async def test_a_router_without_requests_ticks_seldom(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_TICK_S", 1000.0)
    router._tick()
    handle, seen = router.dispatcher.handle, list[ev.Event]()

    def noted(event: ev.Event) -> list[Action]:
        seen.append(event)
        return handle(event)

    monkeypatch.setattr(router.dispatcher, "handle", noted)

    def ticks() -> int:
        seen.clear()
        for _ in range(3):
            router._tick()
        return sum(isinstance(event, ev.Tick) for event in seen)

    assert ticks() == 0
    router._feed(ev.EngineUp(clock_s(), "c", Role.COLOCATED, "g", "n", 4, 4096))
    router._feed(ev.Arrived(clock_s(), Request("r", clock_s(), 64, 8)))
    assert ticks() == 3
    router._feed(ev.Closed(clock_s(), "r", "cancelled"))
    assert ticks() == 0
    # an admission policy changes nothing as long as it is not asked: until a request with an objective comes
    router._feed(ev.PoliciesChanged(clock_s(), admission=ev.PolicyChoice(DEFAULT)))
    assert ticks() == 0
    for ago_s, expected in ((2.0 * REMEMBERS_S, 0), (0.0, 3)):
        came_s = clock_s() - ago_s
        router._feed(ev.Arrived(came_s, Request("s", came_s, 64, 8, terms=Terms(ttft_slo_s=5.0))))
        router._feed(ev.Closed(clock_s(), "s", "cancelled"))
        assert ticks() == expected


# ---------------------------------------------------------------------------------------------------- failing engines


async def fails_at(i: Peer, attempt_id: str, engine_id: str, code: str = "internal") -> None:
    """Submits attempts until one is decoded on the engine, which fails it; the others finish."""
    for n in range(256):
        name = f"{attempt_id}-{n}"
        i.channel.send(wire.Submit(name, prompt_tokens=10, max_tokens=4))
        await i.get(wire.RoutePrefill)
        i.channel.send(wire.PrefillReported(name, 30.0, 1, 0))
        route = await i.get(wire.RouteDecode)
        if route.engine_id == engine_id:  # type: ignore[attr-defined]
            i.channel.send(wire.Closed(name, "failed", 0, engine_id, "decode", code))
            return
        i.channel.send(wire.Closed(name, "finished", 4))
    raise AssertionError(f"nothing was sent to {engine_id}")


async def test_a_failing_engine_is_shown_as_quarantined_with_its_reason_and_is_ready_after_its_probe(
    router: RouterServer,
) -> None:
    await serving(router)
    await engine(router, "d2", "decode")
    i = await peer(router, "ingress", "j")
    router.dispatcher.handle(ev.PoliciesChanged(clock_s(), dispatch={"quarantine_base_s": 0.05}))
    await until(lambda: len(router.status().statuses) == 3)
    for _ in range(2):
        await fails_at(i, "x", "d2")
    fleet = await i.get(wire.Fleet, lambda f: any(e.state == "quarantined" for e in f.engines))  # type: ignore[attr-defined]
    assert {e.id: e.state for e in fleet.engines} == {"d": "ready", "d2": "quarantined", "p": "ready"}  # type: ignore[attr-defined]
    (held,) = router.status().quarantined
    assert (held.engine_id, held.rank, held.reason, held.times) == ("d2", None, "failing", 1)
    assert held.failure_rate == pytest.approx(0.51)
    assert held.for_s >= 0 and 0 <= held.probe_in_s <= 0.05
    assert router.status().totals["quarantines_failing"] == 1
    # the next attempt is the probe, as soon as the back-off is over
    await until(lambda: router.status().quarantined[0].probe_in_s == 0.0)
    i.channel.send(wire.Submit("probe", prompt_tokens=10, max_tokens=4))
    await i.get(wire.RoutePrefill)
    i.channel.send(wire.PrefillReported("probe", 30.0, 1, 0))
    assert (await i.get(wire.RouteDecode)).engine_id == "d2"  # type: ignore[attr-defined]
    assert router.status().quarantined[0].probing
    (prefill, decode) = router.decisions.explain("probe")
    assert prefill["quarantined"] == decode["quarantined"] == {"d2": "failing"}
    assert (decode["decision"]["reason"], decode["policy"]["name"][:5]) == ("probe", "probe")
    i.channel.send(wire.Progress(["probe"], [wire.Grown("probe", 1)]))
    i.channel.send(wire.Closed("probe", "finished", 4))
    await until(lambda: router.status().quarantined == [])
    fleets = lambda: [message for message in i.inbox if isinstance(message, wire.Fleet)]  # noqa: E731
    await until(lambda: bool(fleets()) and all(e.state == "ready" for e in fleets()[-1].engines))


async def test_one_bad_rank_of_an_engine_does_not_make_the_engine_quarantined(router: RouterServer) -> None:
    await ranks(router, "d", "colocated")
    await until(lambda: len(router.status().statuses) == 1)
    i = await peer(router, "ingress", "i")
    failed = 0
    while failed < 2:
        i.channel.send(wire.Submit(f"x{failed}", 10, 4))
        route = await i.get(wire.RoutePrefill)
        bad = route.dp_rank == 1  # type: ignore[attr-defined]
        ended = ("failed", 0, "d", "decode", "internal") if bad else ("finished", 4)
        i.channel.send(wire.Closed(f"x{failed}", *ended))  # type: ignore[arg-type]
        failed += bad
    await until(lambda: bool(router.status().quarantined))
    (held,) = router.status().quarantined
    assert (held.engine_id, held.rank) == ("d", 1)
    assert [info.state for info in router.fleet().engines] == ["ready"]


class Faulty(JoinShortestQueue):
    """A policy with a bug that prompts of 13 tokens reach."""

    def choose_prefill(self, request, workers, snapshot, rng):  # type: ignore[no-untyped-def]
        if request.prompt_tokens == 13:
            raise KeyError("thirteen")
        return super().choose_prefill(request, workers, snapshot, rng)


async def test_a_policy_that_raises_costs_its_request_only(router: RouterServer) -> None:
    d = await engine(router, "d", "decode")
    p = await peer(router, "engine", "p")
    facts = ("p", "prefill", "sim", "m", "g", ("unix:/x",), 8, 100, 16, 1024, "n", 1, 30.0)
    p.channel.send(wire.Announce(wire.EngineInfo(*facts)))  # type: ignore[arg-type]
    router.dispatcher.prefill = Faulty()
    first, second = await peer(router, "ingress", "i"), await peer(router, "ingress", "j")
    for who, attempt_id, tokens in ((first, "a", 10), (first, "b", 13), (second, "c", 12)):
        who.channel.send(wire.Submit(attempt_id, prompt_tokens=tokens, max_tokens=4))
        await until(lambda attempt_id=attempt_id: router.dispatcher.state.stage(attempt_id) is not None)  # type: ignore[misc]
    # all three wait for the first report of the prefill engine, which one batch of decisions follows
    p.channel.send(wire.Status("p", 0, 0, 0, 0, 0.0))
    assert (await first.get(wire.RoutePrefill)).attempt_id == "a"  # type: ignore[attr-defined]
    assert (await second.get(wire.RoutePrefill)).attempt_id == "c"  # type: ignore[attr-defined]
    reject = await first.get(wire.Reject)
    assert (reject.attempt_id, reject.status, reject.reason) == ("b", 500, "policy_error")  # type: ignore[attr-defined]
    assert router.status().totals["policy_errors"] == 1
    assert router.status().in_flight == 2
    assert not any(peer.channel.closed.done() for peer in (first, second, p, d))


async def test_status_says_how_loaded_the_fleet_is_and_which_workers_are_idle(router: RouterServer) -> None:
    _, d, _ = await serving(router)
    load = router.status().load
    assert load is not None
    assert (load.regime, load.prefill, load.decode, load.idle) == ("normal", 0.0, 0.0, ("d", "p"))
    # 20 requests wait for 2 slots of the decode engine
    d.channel.send(wire.Status("d", 2, 20, 0, 0, 0.0))
    await until(lambda: getattr(router.status().load, "regime", "") == "imbalanced")
    status = router.status()
    assert status.load is not None and status.load.decode is not None
    assert status.load.decode > 0.9 and status.load.idle == ("p",)
    assert status.gauges["load_score_decode"] == status.load.decode
    regimes = {name: on for name, on in status.gauges.items() if name.startswith("load_regime_")}
    assert regimes == {"load_regime_normal": 0.0, "load_regime_imbalanced": 1.0, "load_regime_extreme": 0.0}


async def test_status_says_how_long_engines_are_silent_and_how_full_the_queue_may_be(
    router: RouterServer,
) -> None:
    await serving(router)
    gauges = router.status().gauges
    assert gauges["engine_silence_seconds_max"] < 60
    assert gauges["queue_limit"] == router.dispatcher.config.max_queue
    assert gauges["queued_sequences"] == gauges["queued_tokens"] == 0.0 and "queue_limit_tokens" not in gauges
    changed = ev.PoliciesChanged(0.0, dispatch={"max_queue_tokens": 5000})
    router.dispatcher.handle(changed)
    assert router.status().gauges["queue_limit_tokens"] == 5000.0
    router.engines._engines["p"].reported_s -= 100
    assert 100 <= router.status().gauges["engine_silence_seconds_max"] < 160
    assert (gauges["pool_oldest_seconds"], gauges["pool_lease_used_ratio"]) == (0.0, 0.0)


async def test_status_says_how_much_of_a_lease_in_the_pool_has_passed(router: RouterServer) -> None:
    _, _, i = await serving(router)
    # the first one takes both slots of the decode engine, so that the other stays in the pool
    for attempt_id, slots in (("z", 2), ("a", 1)):
        i.channel.send(wire.Submit(attempt_id, 10, 5, slots))
        await i.get(wire.RoutePrefill)
        i.channel.send(wire.PrefillReported(attempt_id, 40.0, 4096, 0))
    await i.get(wire.RouteDecode)
    await until(lambda: router.status().pool == 1)
    entry = router.dispatcher.state.pool_entry("a")
    gauges = router.status().gauges
    assert 0 <= gauges["pool_oldest_seconds"] <= clock_s() - entry.entered_s
    assert gauges["pool_lease_used_ratio"] == pytest.approx(
        gauges["pool_oldest_seconds"] / 40, rel=0.2, abs=0.01
    )


def starved(error: type[Exception]) -> JoinShortestQueue:
    """A policy that gets no memory, which its compiled code may report as another error."""

    class Starved(JoinShortestQueue):
        def choose_prefill(self, request, workers, snapshot, rng):  # type: ignore[no-untyped-def]
            raise error

    return Starved()


@pytest.mark.parametrize("error", [MemoryError, SystemError])
async def test_a_router_that_gets_no_memory_ends(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    ended: list[bool] = []

    def end() -> None:
        ended.append(True)
        raise ConnectionError("this process would be gone")

    monkeypatch.setattr(no_memory, "end", end)
    # more than there is address space for
    monkeypatch.setattr(no_memory, "PROBE_BYTES", 1 << 62)
    await engine(router, "d", "decode")
    await engine(router, "p", "prefill")
    router.dispatcher.prefill = starved(error)
    ingress = await peer(router, "ingress", "i")
    ingress.channel.send(wire.Submit("a", prompt_tokens=10, max_tokens=4))
    await until(lambda: bool(ended))
    assert router.status().totals["policy_errors"] == 0
    assert not any(isinstance(message, wire.Reject) for message in ingress.inbox)


async def test_a_policys_internal_error_rejects_the_request_while_there_is_memory(
    router: RouterServer,
) -> None:
    await engine(router, "d", "decode")
    await engine(router, "p", "prefill")
    router.dispatcher.prefill = starved(SystemError)
    ingress = await peer(router, "ingress", "i")
    ingress.channel.send(wire.Submit("a", prompt_tokens=10, max_tokens=4))
    reject = await ingress.get(wire.Reject)
    assert (reject.attempt_id, reject.status, reject.reason) == ("a", 500, "policy_error")  # type: ignore[attr-defined]
