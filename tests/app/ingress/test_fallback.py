"""Without a router an ingress decides itself, within the limits of the engines, until a router takes over."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from actors import no_memory
from actors.router.server import RouterServer
from actors.wire import channel as channels
from actors.wire import messages as wire
from actors.wire.sockets import connect, listen
from app.fleet import news
from app.ingress import connections, fallback
from app.ingress.config import IngressConfig
from app.ingress.fallback import LocalRouter
from policies.dispatch.dispatcher import Dispatcher
from policies.request.stage import Stage
from policies.routing.base import PolicyError
from tests.app.ingress.rig import (
    COSTLY,
    MODEL,
    Rig,
    ScriptedEngine,
    make_router,
    one_slot_each,
    pair,
    refusal,
    retried_in_a_full_queue,
    rig,
    until,
    users_served,
)

ROOT = Path(__file__).parents[3]


def post(made: Rig, priority: int | None = None, **more: Any) -> asyncio.Task[httpx.Response]:
    headers = {} if priority is None else {"x-sluice-priority": str(priority)}
    body = made.chat(**more)
    return asyncio.create_task(made.client.post("/v1/chat/completions", json=body, headers=headers))


@asynccontextmanager
async def alone(directory: Path, engines: list[ScriptedEngine], **options: Any) -> AsyncIterator[Rig]:
    """A rig whose router has just been lost."""
    config = IngressConfig(**({"served_names": (MODEL,), "sweep_interval_s": 0.02} | options))
    async with rig(directory, engines, config) as made:
        await lose_router(made)
        yield made


async def lose_router(made: Rig) -> None:
    await made.router.stop()
    await until(lambda: not made.connections.router_connected())


async def lose_engines(made: Rig) -> None:
    for engine in made.engines.values():
        engine.kill()
    await until(lambda: made.connections.ready() == "no engine is ready")


async def listen_again(made: Rig) -> None:
    for engine in made.engines.values():
        engine.server, _ = await listen(engine.address, engine._channel)


async def start_router(made: Rig, directory: Path) -> None:
    """Starts a router that the ingress finds; it knows no engine."""
    made.router = make_router(directory)
    await made.router.start([f"unix:{directory}/router.sock"])


async def take_over(made: Rig, directory: Path) -> None:
    """Starts a router that the ingress finds, and to which the engines announce themselves."""
    await start_router(made, directory)
    for engine in made.engines.values():
        await engine.announce(made.router)
    await until(lambda: not made.connections.decides_here())


def stages(made: Rig) -> list[str]:
    return sorted(life.stage.value for life in made.connections.live.values())


async def test_engines_get_no_more_than_they_have_slots_for(tmp_path: Path) -> None:
    async with alone(tmp_path, pair(tmp_path, auto=False, slots=2)) as made:
        p, d = made.engines["p"], made.engines["d"]
        tasks = [post(made) for _ in range(5)]
        await until(lambda: stages(made) == ["prefilling"] * 2 + ["queued"] * 3)
        await until(lambda: len(p.of(wire.Prefill)) == 2)
        for message in p.of(wire.Prefill):
            p.finish_prefill(message.attempt_id)
        await until(lambda: stages(made) == ["prefilling"] * 2 + ["queued"] + ["transferring"] * 2)
        await until(lambda: len(p.of(wire.Prefill)) == 4)
        for message in p.of(wire.Prefill)[2:]:
            p.finish_prefill(message.attempt_id)
        await until(lambda: stages(made) == ["pooled"] * 2 + ["prefilling"] + ["transferring"] * 2)
        await until(lambda: len(d.of(wire.Decode)) == 2)
        # one ends, and the first in the pool gets its slot
        d.admit(d.of(wire.Decode)[0].attempt_id)
        d.token(d.of(wire.Decode)[0].attempt_id, finish="stop")
        await until(lambda: len(d.of(wire.Decode)) == 3)
        assert d.of(wire.Decode)[2].attempt_id == p.of(wire.Prefill)[2].attempt_id
        assert (made.metric("sluice_fallback_decisions_total", task="prefill")) == 5
        for task in tasks:
            task.cancel()
        await until(lambda: not made.connections.live)


async def test_two_users_alternate_while_there_is_no_router(tmp_path: Path) -> None:
    engines = [
        ScriptedEngine("p", "prefill", tmp_path, auto=False, slots=1),
        ScriptedEngine("d", "decode", tmp_path),
    ]
    async with alone(tmp_path, engines) as made:
        flood = [post(made, user="many", **COSTLY) for _ in range(8)]
        await until(lambda: stages(made) == ["prefilling"] + ["queued"] * 7)
        few = [post(made, user="few", **COSTLY) for _ in range(3)]
        await until(lambda: stages(made) == ["prefilling"] + ["queued"] * 10)
        first, *next_six = await users_served(made, 7)
        assert first == "many"
        assert [sorted(next_six[i : i + 2]) for i in (0, 2, 4)] == [["few", "many"]] * 3
        await users_served(made, 4)
        assert {answer.status_code for answer in await asyncio.gather(*flood, *few)} == {200}
        assert made.metric("sluice_fallback_decisions_total", task="prefill") == 11
        await until(lambda: not made.connections.live)


async def test_replicas_of_the_ingress_share_the_slots(tmp_path: Path) -> None:
    async with alone(tmp_path, pair(tmp_path, auto=False, slots=5), replicas=2) as made:
        tasks = [post(made) for _ in range(4)]
        await until(lambda: stages(made) == ["prefilling"] * 2 + ["queued"] * 2)
        for task in tasks:
            task.cancel()
        await until(lambda: not made.connections.live)


async def test_the_ingresses_that_the_lost_router_knew_share_the_slots(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path, auto=False, slots=4)) as made:
        other = await another_ingress(made.router)
        await until(lambda: made.connections.fleet_status and made.connections.fleet_status.ingresses == 2)
        await lose_router(made)
        tasks = [post(made) for _ in range(3)]
        await until(lambda: stages(made) == ["prefilling"] * 2 + ["queued"])
        for task in tasks:
            task.cancel()
        await until(lambda: not made.connections.live)
        other.abort("test over")


async def another_ingress(router: RouterServer) -> channels.Channel:
    identity = channels.Identity("ingress", "other")
    return await connect(router.addresses, lambda: channels.Channel(identity, lambda c, m: None))


async def test_the_most_urgent_goes_first_though_it_waited_at_the_lost_router(tmp_path: Path) -> None:
    engines = pair(tmp_path, auto=False)
    engines[0].slots = 1
    async with rig(tmp_path, engines) as made:
        p = made.engines["p"]
        tasks = [post(made)]
        await until(lambda: p.of(wire.Prefill))
        for n, priority in enumerate((7, 3, 5)):
            tasks.append(post(made, priority))
            await until(lambda: made.router.dispatcher.queue_size == n + 1)  # noqa: B023
        await lose_router(made)
        tasks.append(post(made, 4))
        await until(lambda: stages(made) == ["prefilling"] + ["queued"] * 4)
        for n in range(1, 5):
            p.finish_prefill(p.of(wire.Prefill)[-1].attempt_id)
            await until(lambda: len(p.of(wire.Prefill)) == n + 1)  # noqa: B023
        assert [message.priority for message in p.of(wire.Prefill)] == [0, 3, 4, 5, 7]
        for task in tasks:
            task.cancel()
        await until(lambda: not made.connections.live)


async def test_the_most_urgent_gets_the_room_that_there_is_when_the_router_is_lost(tmp_path: Path) -> None:
    engines = pair(tmp_path, auto=False)
    engines[0].slots = 2
    async with rig(tmp_path, engines) as made:
        made.router._submit = lambda channel, message: None  # type: ignore[method-assign]
        tasks = [post(made, priority) for priority in (7, 3, 5, 4)]
        await until(lambda: len(made.connections.live) == 4)
        await lose_router(made)
        p = made.engines["p"]
        await until(lambda: len(p.of(wire.Prefill)) == 2)
        assert [message.priority for message in p.of(wire.Prefill)] == [3, 4]
        for task in tasks:
            task.cancel()
        await until(lambda: not made.connections.live)


async def test_the_queue_is_bounded_in_number_and_in_time(tmp_path: Path) -> None:
    engines = pair(tmp_path, auto=False)
    engines[0].slots = 1
    async with alone(tmp_path, engines, fallback_queue=2, fallback_wait_s=5.0) as made:
        tasks = []
        for n in range(3):
            tasks.append(post(made, n))
            await until(lambda: stages(made) == ["prefilling"] + ["queued"] * n)  # noqa: B023
        refused = await post(made, 3)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        late = await asyncio.gather(*tasks[1:])
        assert [answer.status_code for answer in late] == [503, 503]
        assert [answer.json()["error"]["code"] for answer in late] == ["queue_timeout"] * 2
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in late)
        assert stages(made) == ["prefilling"]
        tasks[0].cancel()
        await until(lambda: not made.connections.live)


async def test_the_queue_is_bounded_in_tokens(tmp_path: Path) -> None:
    engines = pair(tmp_path, auto=False)
    engines[0].slots = 1
    async with alone(tmp_path, engines, fallback_queue_tokens=40) as made:
        tasks = [post(made)]
        await until(lambda: stages(made) == ["prefilling"])
        tasks.append(post(made))
        await until(lambda: stages(made) == ["prefilling", "queued"])
        refused = await post(made, **COSTLY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert stages(made) == ["prefilling", "queued"]
        for task in tasks:
            task.cancel()
        await until(lambda: not made.connections.live)


async def test_what_its_own_rates_cannot_meet_is_refused_at_its_arrival(tmp_path: Path) -> None:
    engines = [ScriptedEngine("p", "prefill", tmp_path), ScriptedEngine("d", "decode", tmp_path, step_s=0.02)]
    async with alone(tmp_path, engines) as made:
        local = made.connections._local._dispatcher
        assert local is not None
        # nobody had an objective so far, and the engines are measured all the same
        running = [post(made, max_tokens=60) for _ in range(4)]
        await until(lambda: bool(local._gate._rates.lines), "a rate")
        assert {(await task).status_code for task in running} == {200}
        refused = await post(made, slo={"tpot_ms": 1})
        assert refusal(refused) == (429, "tpot_objective")
        message = refused.json()["error"]["message"]
        assert "a token is expected to take " in message
        assert "and the request allows 1 ms; try again in " in message
        assert (await post(made, slo={"tpot_ms": 60_000})).status_code == 200
        assert (await post(made)).status_code == 200
        await until(lambda: not made.connections.live)


@pytest.mark.parametrize("admission", ["by_wait", "open"])
async def test_what_becomes_late_in_the_queue_is_shed_unless_all_are_taken(
    tmp_path: Path, admission: str
) -> None:
    engines = pair(tmp_path)
    engines[0].auto, engines[0].slots = False, 1
    async with alone(tmp_path, engines, fallback_admission=admission) as made:
        p = engines[0]
        first = post(made)
        await until(lambda: p.of(wire.Prefill), "a prompt to compute")
        late = post(made, slo={"ttft_ms": 300})
        await until(lambda: len(made.connections.live) == 2)
        if admission == "by_wait":
            answer = await late
            assert refusal(answer) == (429, "late")
            assert ", and the request allows 0.3 s; try again in " in answer.json()["error"]["message"]
        else:
            await asyncio.sleep(1.0)
            assert stages(made) == ["prefilling", "queued"]
        p.auto = True
        p.finish_prefill(p.of(wire.Prefill)[0].attempt_id)
        assert (await first).status_code == 200
        assert (await late).status_code == (429 if admission == "by_wait" else 200)
        await until(lambda: not made.connections.live)


async def test_a_retry_is_neither_late_nor_refused_by_a_full_queue(tmp_path: Path) -> None:
    async with alone(tmp_path, one_slot_each(tmp_path), fallback_queue=1) as made:
        local = made.connections._local._dispatcher
        assert local is not None
        await retried_in_a_full_queue(made, local, made.connections.now_s)
        await until(lambda: not made.connections.live)


async def test_an_answer_that_goes_on_elsewhere_is_not_late(tmp_path: Path) -> None:
    p, d = pair(tmp_path, auto=False)
    e = ScriptedEngine("e", "decode", tmp_path, auto=False)
    async with alone(tmp_path, [p, d, e]) as made:
        task = post(made, stream=True, slo={"ttft_ms": 2000})
        await until(lambda: p.of(wire.Prefill), "a prompt to compute")
        p.finish_prefill(p.of(wire.Prefill)[0].attempt_id)
        await until(lambda: d.of(wire.Decode) or e.of(wire.Decode), "a decode")
        first, second = (d, e) if d.of(wire.Decode) else (e, d)
        attempt_id = first.of(wire.Decode)[0].attempt_id
        first.admit(attempt_id)
        first.token(attempt_id, "first ")
        await until(lambda: made.connections.live[attempt_id].output_tokens == 1)
        # it is without a token for longer than its objective allows, and then needs another prefill
        await asyncio.sleep(2.2)
        p.auto = second.auto = True
        first.kill()
        first.live.clear()
        answer = await task
        assert answer.text.endswith("data: [DONE]\n\n")
        assert made.metric("sluice_migrations_total", code="engine_lost") == 1
        await until(lambda: not made.connections.live)


async def test_an_engine_that_is_lost_or_comes_counts_at_once(tmp_path: Path) -> None:
    async with alone(tmp_path, pair(tmp_path)) as made:
        p, d = made.engines["p"], made.engines["d"]
        d.kill()
        await until(lambda: made.connections.ready() is not None)
        # nothing can decode: no prompt is computed for nothing
        task = post(made)
        await until(lambda: stages(made) == ["queued"])
        d.server, _ = await listen(d.address, d._channel)
        assert (await task).status_code == 200
        for engine in (p, d):
            engine.kill()
        await until(lambda: not p.channels and not d.channels)
        answer = await post(made)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine")
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_request_waits_for_engines_that_are_connected_again_soon(tmp_path: Path) -> None:
    """All connections end at once, as after a stop of this process; a request comes before they stand again."""
    async with alone(tmp_path, pair(tmp_path)) as made:
        await lose_engines(made)
        task = post(made)
        await until(lambda: stages(made) == ["queued"])
        await listen_again(made)
        assert (await task).status_code == 200


async def test_where_only_a_stalled_engine_is_connected_a_request_does_not_use_up_its_retries_there(
    tmp_path: Path,
) -> None:
    """A process that stood still is connected to a stalled engine first, and to one that is well a moment later."""

    class Stalled(ScriptedEngine):
        def finish_prefill(self, attempt_id: str) -> None:
            del self.live[attempt_id]
            self.send(wire.Failed(attempt_id, "prefill", "stalled", "it stands still", True, silent_s=20.0))

    p, d = pair(tmp_path)
    stalled = Stalled("stalled", "prefill", tmp_path)
    async with alone(tmp_path, [stalled, p, d], max_retries=5) as made:
        p.kill()
        await until(lambda: not p.channels)
        task = post(made)
        await until(lambda: len(stalled.of(wire.Prefill)) == 2, "a second try")
        p.server, _ = await listen(p.address, p._channel)
        assert (await task).status_code == 200
        assert len(stalled.of(wire.Prefill)) <= 4


async def test_a_request_waits_for_engines_where_the_router_is_found_first(tmp_path: Path) -> None:
    """An ingress stands still until router and engines have given it up, as their connections show when it goes on. The
    router is there at once, knows both engines as ready, and decides; they are connected a moment later.
    """
    async with rig(tmp_path, pair(tmp_path)) as made:
        for engine in made.engines.values():
            assert engine.server is not None
            engine.server.close()
            engine.channels[0].abort("the ingress was silent")
        for router in list(made.router._ingresses._ingresses):
            router.abort("the ingress was silent")
        # runs when the other ends are closed, and before anybody reads of it
        asyncio.get_running_loop().call_soon(time.sleep, 3.0)
        await until(lambda: made.connections.ready() == "no engine is ready", "the end of the connections")
        await until(lambda: made.connections.router_connected() and not made.connections.decides_here())
        answer = post(made)
        await until(lambda: [life.stage for life in made.connections.live.values()] == [Stage.PREFILLING])
        await listen_again(made)
        assert (await answer).status_code == 200
        for task in ("prefill", "decode"):
            assert made.metric("sluice_retries_total", task=task, reason="not_connected") == 0
        await made.idle()


async def test_a_router_that_knows_no_engine_gets_no_request_from_an_ingress_that_knows_none(
    tmp_path: Path,
) -> None:
    """All processes lose one another, as after a stop of this one and the router; the two find each other first."""
    async with alone(tmp_path, pair(tmp_path)) as made:
        await lose_engines(made)
        task = post(made)
        await start_router(made, tmp_path)
        await until(lambda: made.connections.router_connected() and made.connections.fleet is not None)
        await asyncio.sleep(0.2)
        assert made.connections.decides_here()
        assert stages(made) == ["queued"]
        await listen_again(made)
        for engine in made.engines.values():
            await engine.announce(made.router)
        assert (await task).status_code == 200
        assert not made.connections.decides_here()


async def test_the_router_says_in_the_end_that_there_is_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDOVER_S", 0.3)
    async with alone(tmp_path, pair(tmp_path)) as made:
        await lose_engines(made)
        task = post(made)
        await start_router(made, tmp_path)
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine")
        await until(lambda: not made.connections.decides_here())


async def test_a_request_is_told_when_no_engine_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "HOLD_S", 5.0)
    async with alone(tmp_path, pair(tmp_path)) as made:
        await lose_engines(made)
        gone, stays = post(made), post(made)
        await until(lambda: stages(made) == ["queued"] * 2)
        gone.cancel()
        answer = await stays
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine")
        await until(lambda: not made.connections.live)


async def test_tool_calls_are_no_bad_request_while_every_engine_is_gone(tmp_path: Path) -> None:
    """An engine that parses tool calls may come back; while one is there that does not, the request is at fault."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    async with alone(tmp_path, pair(tmp_path)) as made:
        answer = await post(made, tools=tools)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        await lose_engines(made)
        await take_over(made, tmp_path)
        await lose_engines(made)
        await until(lambda: not made.connections.engines())
        answer = await post(made, tools=tools)
        assert answer.status_code == 503


async def test_a_router_that_comes_back_decides_what_waits(tmp_path: Path) -> None:
    """One request decodes, one waits in the pool, one computes, one waits in the queue."""
    engines = pair(tmp_path, auto=False, slots=1)
    async with alone(tmp_path, engines) as made:
        p, d = made.engines["p"], made.engines["d"]
        tasks = []
        for n in range(4):
            tasks.append(post(made))
            await until(lambda: len(made.connections.live) == n + 1)  # noqa: B023
            if n < 2:
                await until(lambda: len(p.of(wire.Prefill)) == n + 1)  # noqa: B023
                p.finish_prefill(p.of(wire.Prefill)[-1].attempt_id)
        order = [message.attempt_id for message in p.of(wire.Prefill)]
        await until(lambda: stages(made) == ["pooled", "prefilling", "queued", "transferring"])
        d.admit(order[0])
        await until(lambda: stages(made) == ["decoding", "pooled", "prefilling", "queued"])
        before = made.metric("sluice_fallback_decisions_total", task="decode")
        # it has waited for five minutes, with a renewal five seconds ago
        times = made.connections.live[order[1]].times
        assert times.pooled_s is not None
        times.pooled_s -= 300.0
        times.renewed_s = times.pooled_s + 295.0
        await take_over(made, tmp_path)
        await until(lambda: made.router.status().in_flight == 4)
        status = made.router.status()
        assert (status.queued, status.pool) == (1, 1)
        workers = made.router.dispatcher.state.snapshot(0.0).workers
        assert (workers["p"].prefilling, workers["d"].slots_used) == (1, 1)
        entry = made.router.dispatcher.state.pool_entry(order[1])
        assert entry.kv_bytes == 4096
        assert entry.renewed_s is not None
        assert entry.renewed_s - entry.entered_s == pytest.approx(295.0)
        assert entry.lease_until_s - entry.entered_s > 300.0
        assert entry.lease_s == 30.0
        # the slot becomes free: the router sends the pooled request there
        d.token(order[0], finish="stop")
        assert (await tasks[0]).status_code == 200
        await until(lambda: len(d.of(wire.Decode)) == 2)
        assert d.of(wire.Decode)[1].attempt_id == order[1]
        assert made.metric("sluice_fallback_decisions_total", task="decode") == before
        for task in tasks[1:]:
            task.cancel()
        await made.idle()


async def test_a_router_that_asks_again_is_answered_with_the_present_stage(tmp_path: Path) -> None:
    engines = pair(tmp_path, auto=False)
    engines[0].slots = 1
    async with rig(tmp_path, engines) as made:
        heard: list[wire.Message] = []
        tasks = [post(made)]
        await until(lambda: made.engines["p"].of(wire.Prefill))
        tasks.append(post(made))
        await until(lambda: made.router.dispatcher.queue_size == 1)
        submit = made.router._submit
        made.router._submit = lambda c, m: (heard.append(m), submit(c, m))[0]  # type: ignore[method-assign]
        made.router._adopt = lambda c, m: heard.append(m)  # type: ignore[method-assign]
        for attempt_id in list(made.connections.live):
            made.router._ingresses.broadcast(wire.Unknown(attempt_id))
        await until(lambda: len(heard) == 2)
        kinds = {type(m): getattr(m, "stage", "queued") for m in heard}
        assert kinds == {wire.Adopt: "prefilling", wire.Submit: "queued"}
        for task in tasks:
            task.cancel()
        await made.idle()


# ------------------------------------------------------------------------------------------------- silent routers


async def test_a_router_that_lives_but_sends_no_news_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news, "TICK_S", 0.05)
    async with rig(tmp_path, pair(tmp_path, auto=False)) as made:
        made.router._broadcast_status = lambda: None  # type: ignore[method-assign]
        made.router._submit = lambda channel, message: None  # type: ignore[method-assign]
        task = post(made)
        await until(lambda: made.metric("sluice_silent_peers_total", peer="router") >= 1)
        await until(lambda: made.engines["p"].of(wire.Prefill))
        assert made.metric("sluice_fallback_decisions_total", task="prefill") == 1
        task.cancel()
        await until(lambda: not made.connections.live)


ROUTER = """
import asyncio, sys
from pathlib import Path
from tests.app.ingress.rig import make_router

async def main():
    router = make_router(Path("."))
    await router.start([sys.argv[1]])
    print("up", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_a_stopped_router_holds_no_request_up(tmp_path: Path) -> None:
    """The router is a process of its own; its connections stay open while it is stopped."""
    async with alone(tmp_path, pair(tmp_path)) as made:
        address = f"unix:{tmp_path}/router.sock"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ROUTER, address, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            await asyncio.wait_for(process.stdout.readline(), 100)
            there = cast(RouterServer, SimpleNamespace(addresses=(address,)))
            for engine in made.engines.values():
                await engine.announce(there)
            await until(lambda: not made.connections.decides_here())
            before = made.metric("sluice_fallback_decisions_total", task="prefill")
            assert (await post(made)).status_code == 200
            assert made.metric("sluice_fallback_decisions_total", task="prefill") == before
            silent = made.metric("sluice_silent_peers_total", peer="router")
            os.kill(process.pid, signal.SIGSTOP)
            answers = await asyncio.gather(*(post(made) for _ in range(5)))
            assert [answer.status_code for answer in answers] == [200] * 5
            assert made.connections.decides_here()
            assert made.metric("sluice_silent_peers_total", peer="router") == silent + 1
            links = [engine.link for engine in made.engines.values() if engine.link]
            await until(lambda: not any(link.open for link in links), "the engines to leave the router")
            os.kill(process.pid, signal.SIGCONT)
            await until(made.connections.router_connected)
            # the router has lost its engines meanwhile, and must not reject what comes now
            answers = await asyncio.gather(*(post(made) for _ in range(5)))
            assert [answer.status_code for answer in answers] == [200] * 5
            for engine in made.engines.values():
                await engine.announce(there)
            await until(lambda: not made.connections.decides_here())
            assert (await post(made)).status_code == 200
        finally:
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
            await process.wait()


def policy_error() -> PolicyError:
    """The error that the dispatcher makes of an allocation that failed in a policy's compiled code."""
    error = PolicyError("a policy cannot decide")
    error.__cause__ = SystemError("error return without exception set")
    return error


@pytest.mark.parametrize("error", [MemoryError, policy_error])
async def test_an_ingress_whose_own_decision_gets_no_memory_ends(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception]
) -> None:
    def starved(*_: object) -> None:
        raise error()

    def end() -> None:
        raise SystemExit(no_memory.EXIT_STATUS)

    monkeypatch.setattr(no_memory, "end", end)
    # more than there is address space for
    monkeypatch.setattr(no_memory, "PROBE_BYTES", 1 << 62)
    local = LocalRouter(IngressConfig((MODEL,)), lambda: 0.0, lambda *_: None, lambda _: None)
    local.open([], 1)
    monkeypatch.setattr(Dispatcher, "handle", starved)
    with pytest.raises(SystemExit):
        local.tick()
