"""Roles and duties change under load, over real sim engines: requests reach an engine that was warm, streams go on
while their engines switch, and a new router learns everything again.
"""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from actors.wire import messages as wire
from tests.actors.router.test_autoscaler import autoscaler, observed
from tests.actors.router.test_server import Peer
from tests.app.ingress.rig import Rig, make_router, rig, until
from tests.app.ingress.test_with_sim import Sim, engines  # noqa: F401  (a fixture)

SLOW = {"timing": {"decode_base_s": 0.01}}
"""Decode steps of 10 ms: an answer lasts long enough for something to happen meanwhile."""


async def fleet(made: Rig, directory: Path, known: dict[str, Sim], **roles: str) -> None:
    """Starts engines, each as "prefill", "decode", or "warm decode"; waits until the ingress is connected to all."""
    for name, given in roles.items():
        duty: wire.Duty = "warm" if given.startswith("warm") else "active"
        options = {**SLOW, "slots": 2} if given.endswith("decode") else SLOW
        known[name] = await Sim.start(made, directory, name, given.split()[-1], duty, **options)
    await until(lambda: len(made.connections.engines()) == len(roles) and made.connections.ready() is None)
    await until(lambda: all(link.connected for link in made.connections._engines.all()), "all links")


def ask(made: Rig, number: int, tokens: int) -> asyncio.Task[httpx.Response]:
    body: dict[str, Any] = {"prompt": [number + 1] * 40, "max_tokens": tokens, "stream": number % 2 == 0}
    return asyncio.create_task(made.client.post("/v1/completions", json=body))


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("application/json"):
        return str(answer.json()["choices"][0]["text"])
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    assert lines.pop() == "[DONE]"
    pieces = [httpx.Response(200, text=line).json()["choices"][0]["text"] for line in lines]
    return "".join(pieces)


def decoded(sim: Sim) -> int:
    return sim.server.metrics().decode_tokens


def facts(made: Rig) -> dict[str, tuple[str, str]]:
    """Role and duty of each engine, as the router knows them."""
    return {info.id: (info.role, info.duty) for info in made.router.engines.infos()}


async def assigned(made: Rig, a: Peer, **wanted: tuple[wire.Role, wire.Duty]) -> None:
    """Has the autoscaler give orders, and waits until the router and the ingress know that they were carried out."""
    for name, (role, duty) in wanted.items():
        a.channel.send(wire.Assign(name, role, duty))
    await until(lambda: wanted.items() <= facts(made).items(), f"{wanted}")
    seen = lambda: {info.id: (info.role, info.duty) for info in made.connections.engines()}  # noqa: E731
    await until(lambda: wanted.items() <= seen().items(), f"{wanted} at the ingress")


async def test_a_warm_engine_is_activated_under_load_and_gets_requests(
    tmp_path: Path,
    engines: dict[str, Sim],  # noqa: F811
) -> None:
    async with rig(tmp_path, []) as made:
        await fleet(made, tmp_path, engines, p="prefill", d="decode", w="warm decode")
        a = await autoscaler(made.router)
        tasks = [ask(made, number, 60) for number in range(10)]
        # the only active decode engine is full, and finished prefills wait for it
        await until(lambda: made.router.dispatcher.state.pool_size >= 4, "a backlog")
        seen, _ = await observed(a, 3)
        assert [(e.engine, e.duty.value) for e in seen.engines] == [
            ("d", "active"),
            ("p", "active"),
            ("w", "warm"),
        ]
        assert decoded(engines["w"]) == 0
        await assigned(made, a, w=("decode", "active"))
        texts = [text_of(await task) for task in tasks]
        assert decoded(engines["w"]) > 0
        await made.idle()
        # a warm engine gets nothing more, and what one engine answers is what two have answered
        await assigned(made, a, w=("decode", "warm"))
        before = decoded(engines["w"])
        assert [text_of(await ask(made, number, 60)) for number in range(10)] == texts
        assert decoded(engines["w"]) == before
        seen, rows = await observed(a, 3)
        while not rows:
            seen, rows = await observed(a, 3)
        # the step that was set is found in the engines' own totals
        assert 0.005 < seen.capability.profile.step_s(0, 1, 100) < 0.05
        await made.idle()
    for sim in engines.values():
        assert sim.idle()


async def test_engines_switch_while_streams_run_and_every_text_is_the_undisturbed_one(
    tmp_path: Path,
    engines: dict[str, Sim],  # noqa: F811
) -> None:
    async with rig(tmp_path, []) as made:
        await fleet(made, tmp_path, engines, p0="prefill", p1="prefill", d0="decode", d1="decode")
        calm = [text_of(answer) for answer in await asyncio.gather(*(ask(made, n, 120) for n in range(8)))]
        a = await autoscaler(made.router)
        tasks = [ask(made, number, 120) for number in range(4)]
        await until(lambda: engines["d1"].server.status().running > 0, "streams on d1")
        await assigned(made, a, p1=("decode", "active"), d1=("prefill", "active"))
        so_far = decoded(engines["p1"])
        tasks += [ask(made, number, 120) for number in range(4, 8)]
        await until(lambda: decoded(engines["p1"]) > so_far, "output of the former prefill engine")
        await assigned(made, a, p1=("prefill", "active"), d1=("decode", "active"))
        assert [text_of(await task) for task in tasks] == calm
        # nothing was cut, retried or moved for it
        assert made.metric("sluice_retries_total", task="decode", reason="engine_lost") == 0
        assert not list(made.app.metrics.retries.collect()[0].samples)
        assert not list(made.app.metrics.migrations.collect()[0].samples)
        await made.idle()
    for sim in engines.values():
        assert sim.idle()


async def test_a_new_router_learns_roles_and_duties_from_the_engines(
    tmp_path: Path,
    engines: dict[str, Sim],  # noqa: F811
) -> None:
    async with rig(tmp_path, []) as made:
        await fleet(made, tmp_path, engines, p="prefill", d="decode", e="decode", w="warm decode")
        a = await autoscaler(made.router, 1)
        await assigned(made, a, e=("colocated", "active"), d=("decode", "warm"), w=("decode", "active"))
        known = facts(made)
        task = ask(made, 1, 200)
        await until(lambda: decoded(engines["w"]) + decoded(engines["e"]) > 0, "a stream")
        await made.router.stop()
        await until(lambda: made.connections.decides_here(), "the ingress alone")
        made.router = make_router(tmp_path)
        await made.router.start([f"unix:{tmp_path}/router.sock"])
        await until(lambda: facts(made) == known, "the same roles and duties")
        await until(lambda: not made.connections.decides_here(), "a router")
        again = await autoscaler(made.router, 2)
        seen, _ = await observed(again, 4)
        assert {e.engine: (e.role.value, e.duty.value) for e in seen.engines} == known
        # no window is complete yet: the new router does not take what it has not seen for no load
        assert seen.windows is None
        before = decoded(engines["d"])
        assert [text_of(answer) for answer in await asyncio.gather(*(ask(made, n, 20) for n in range(4)))]
        assert decoded(engines["d"]) == before
        assert text_of(await task)
        await assigned(made, again, d=("decode", "active"))
        await made.idle()
    for sim in engines.values():
        assert sim.idle()
