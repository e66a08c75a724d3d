"""The end of running work at a stalled, dead or drained engine: every open task fails, retryable, over real sockets."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.engine import server
from actors.engine.report import QUIET_ROUNDS, Reporter
from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.wire.channel import Channel, Identity
from actors.wire.messages import Announce, EngineState, Failed, Message, Out, PrefillDone, Status
from actors.wire.sockets import listen
from tests.actors.engine.rig import Node, Rig, until

PROMPT = list(range(10, 60))
SLOW = {"prefill_base_s": 0.02, "decode_base_s": 0.02}


class Watched(SimEngine):
    """A sim engine whose state the test decides, as a watchdog would."""

    state: EngineState = "ready"
    silent_s = 4.5


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        yield rig


async def watched(rig: Rig, name: str = "c", role: Any = "colocated", **options: Any) -> tuple[Node, Watched]:
    engine = Watched(SimEngineConfig(name, role, timing=SLOW, **options))
    return await rig.node(engine, name), engine


CASES: list[tuple[EngineState, str]] = [("stalled", "stalled"), ("down", "engine_dead")]


@pytest.mark.parametrize(("state", "code"), CASES)
async def test_all_open_work_moves_elsewhere_and_new_work_is_refused(
    rig: Rig, state: EngineState, code: str
) -> None:
    """A running decode, one that waits for a slot, and a prefill; two ingresses."""
    c, engine = await watched(rig, slots=1)
    other = await rig.client(c, "other")
    c.client.decode("running", PROMPT, max_tokens=5000)
    await c.client.wait("running", Out)
    other.decode("waiting", PROMPT, max_tokens=50)
    other.prefill("prompt", PROMPT)
    await until(lambda: c.server.in_flight == 3, "three tasks")
    engine.state = state
    for client, attempt_id, task in (
        (c.client, "running", "decode"),
        (other, "waiting", "decode"),
        (other, "prompt", "prefill"),
    ):
        failed = await client.wait(attempt_id, Failed)
        assert (failed.code, failed.task, failed.retryable) == (code, task, True)
        assert failed.silent_s == (4.5 if state == "stalled" else 0.0)
    c.client.decode("new", PROMPT)
    failed = await c.client.wait("new", Failed)
    assert (failed.code, failed.retryable) == (code, True)
    # what comes to an engine that stands still or is dead has not brought it down
    assert failed.silent_s == (4.5 if state == "stalled" else math.inf)
    assert c.server.status().state == c.server.info().state == state
    # The engine holds nothing of it any more, so that a core that goes on does no work for nobody.
    await c.rests()


async def test_a_core_that_goes_on_is_ready_again(rig: Rig) -> None:
    c, engine = await watched(rig)
    engine.state = "stalled"
    await until(lambda: c.server.state == "stalled", "the stall")
    engine.state = "ready"
    await until(lambda: c.server.state == "ready", "the end of the stall")
    c.client.decode("r", PROMPT)
    assert await c.client.text("r")


async def test_the_first_failure_of_a_dead_core_makes_the_engine_down_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next look at the state would come in a minute."""
    monkeypatch.setattr(server, "LOOK_S", 60.0)
    c, engine = await watched(rig)
    for name in ("a", "b"):
        c.client.decode(name, PROMPT, max_tokens=5000)
        await c.client.wait(name, Out)
    engine.state = "down"
    c.server.failed(Failed("a", "decode", "engine_dead", "the core died", True))
    for name in ("a", "b"):
        assert (await c.client.wait(name, Failed)).code == "engine_dead"
    assert c.server.state == "down"
    c.client.decode("new", PROMPT)
    assert (await c.client.wait("new", Failed)).code == "engine_dead"


@pytest.mark.parametrize(("state", "code"), CASES)
async def test_work_that_comes_to_an_idle_engine_finds_its_present_state(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, state: EngineState, code: str
) -> None:
    """The next look at the state would come in a minute."""
    monkeypatch.setattr(server, "LOOK_S", 60.0)
    monkeypatch.setattr(server, "IDLE_LOOK_S", 60.0)
    c, engine = await watched(rig)
    engine.state = state
    c.client.decode("new", PROMPT)
    failed = await c.client.wait("new", Failed)
    # it has not brought the engine down
    assert (failed.code, failed.silent_s) == (code, 4.5 if state == "stalled" else math.inf)
    engine.state = "ready"
    c.client.decode("after", PROMPT)
    assert await c.client.text("after")


async def test_an_engine_is_looked_at_often_only_while_it_has_something_to_do(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_LOOK_S", 1000.0)
    c, _ = await watched(rig, lease_s=0.2)

    def next_look_s() -> float:
        assert c.server._looks is not None
        return c.server._looks.when() - asyncio.get_running_loop().time()

    assert next_look_s() > 500
    c.client.decode("r", PROMPT, max_tokens=5000)
    await c.client.wait("r", Out)
    assert next_look_s() < 1
    c.client.cancel("r")
    await until(lambda: next_look_s() > 500, "the engine is looked at seldom again")
    # a lease that nobody gives back counts until its time is over
    c.client.prefill("leased", PROMPT)
    await c.client.wait("leased", PrefillDone)
    await until(lambda: next_look_s() > 500, "a lease that is over counts no more")
    assert not c.server._requests


async def test_leases_of_a_stalled_engine_stay(rig: Rig) -> None:
    """Another engine can read the KV without the core that stands still."""
    p, engine = await watched(rig, "p", "prefill")
    await p.prefilled("r", PROMPT)
    engine.state = "stalled"
    await until(lambda: p.server.state == "stalled", "the stall")
    assert [type(m) for m in p.client.of("r")] == [PrefillDone]
    assert p.engine.status().leases == 1
    p.client.release("r")
    await p.rests()


async def test_a_drain_that_ends_before_its_streams_moves_them(rig: Rig) -> None:
    c, _ = await watched(rig)
    c.client.decode("long", PROMPT, max_tokens=5000)
    c.client.decode("short", PROMPT, max_tokens=2)
    await c.client.wait("long", Out)
    assert not await c.server.drain(timeout_s=0.5)
    failed = await c.client.wait("long", Failed)
    assert (failed.code, failed.task, failed.retryable) == ("draining", "decode", True)
    assert await c.client.text("short")
    c.client.decode("new", PROMPT)
    assert (await c.client.wait("new", Failed)).code == "draining"
    await c.rests()


async def test_a_stop_without_a_drain_moves_running_work(rig: Rig) -> None:
    """The failure is read before the connection ends."""
    c, _ = await watched(rig)
    c.client.decode("r", PROMPT, max_tokens=5000)
    await c.client.wait("r", Out)
    await c.server.stop()
    assert (await c.client.wait("r", Failed)).code == "draining"
    await c.client.channel.closed


async def test_an_engine_that_does_not_watch_itself_is_ready_or_draining(rig: Rig) -> None:
    engine = SimEngine(SimEngineConfig("plain"))
    c = await rig.node(engine, "plain")
    assert c.server.state == "ready"
    c.server.refuse_new_work()
    assert c.server.state == c.server.info().state == c.server.status().state == "draining"


async def test_a_change_of_state_is_announced_at_once(rig: Rig, tmp_path: Path) -> None:
    """The router hears each state in an Announce of its own, and in every status; a drain does not hide a stall."""
    heard: list[Message] = []
    me = Identity("router", "r")
    listener, address = await listen(
        f"unix:{tmp_path}/router.sock", lambda: Channel(me, lambda _, message: heard.append(message))
    )
    c, engine = await watched(rig)
    reporter = Reporter(Identity("engine", "c"), c.server, lambda: asyncio.sleep(0, (address,)))
    reporter.start()

    def announced() -> list[str]:
        return [m.info.state for m in heard if isinstance(m, Announce)]

    try:
        for state in ("stalled", "ready", "down"):
            engine.state = state  # type: ignore[assignment]
            await until(lambda state=state: announced()[-1:] == [state], state)  # type: ignore[misc]
            last = heard[-1]
            await until(
                lambda last=last: heard[-1] is not last and isinstance(heard[-1], Status),
                "a status",  # type: ignore[misc]
            )
            assert isinstance(heard[-1], Status)
            assert heard[-1].state == state
        c.server.refuse_new_work()
        reporter.announce()
        await until(lambda: len(announced()) > 4, "the drain's announcement")
        assert announced()[-1] == "down"
    finally:
        await reporter.stop()
        listener.close()


async def test_an_idle_engine_is_looked_at_once_a_second_until_work_comes(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Status] = []
    me = Identity("router", "r")
    listener, address = await listen(
        f"unix:{tmp_path}/router.sock",
        lambda: Channel(me, lambda _, m: heard.append(m) if isinstance(m, Status) else None),
    )
    node = await rig.node(SimEngine(SimEngineConfig("e")), "e")
    looks, status = 0, node.server.status

    def looked() -> Status:
        nonlocal looks
        looks += 1
        return status()

    monkeypatch.setattr(node.server, "status", looked)
    reporter = Reporter(Identity("engine", "e"), node.server, lambda: asyncio.sleep(0, (address,)))
    reporter.start()
    try:
        await until(lambda: reporter._quiet >= QUIET_ROUNDS, "it is idle")
        told, looks = len(heard), 0
        await until(lambda: len(heard) == told + 3, "three more reports")
        # ten looks a report would be 30
        assert looks <= 6
        node.client.decode("r", [1, 2, 3], max_tokens=2_000)
        await until(lambda: heard[-1].running, "the work is told")
        told, looks = len(heard), 0
        await until(lambda: len(heard) == told + 3, "reports of the work")
        assert looks <= 6
        node.client.cancel("r")
        await until(lambda: reporter._quiet >= QUIET_ROUNDS, "it is idle again")
        told = len(heard)
        node.server.refuse_new_work()
        await until(lambda: heard[-1].state == "draining", "the state is told")
        # one that was due may have come before
        assert len(heard) <= told + 2
    finally:
        await reporter.stop()
        listener.close()
