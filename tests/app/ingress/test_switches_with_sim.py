"""An engine that dies while it switches its role, over real sockets: an autoscaler orders the switch, requests are
under way at the engine, and only Serve is in memory.
"""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from actors.scaling.control import Controller
from actors.scaling.fleet import Group
from actors.scaling.server import Autoscaler
from actors.wire import messages as wire
from actors.wire.channel import Identity
from policies.scaling.base import ScalingPolicy
from policies.scaling.registry import make
from policies.state.views import Role
from tests.app.ingress.rig import Rig, rig, until
from tests.app.ingress.test_duty_with_sim import ask, facts, text_of
from tests.app.ingress.test_sleep_with_sim import Serve

GROUPS = {"p": Group("p", Role.PREFILL, 1, 4, 2), "d": Group("d", Role.DECODE, 1, 4, 2)}
OPTIONS = {"slots": 2, "timing": {"decode_base_s": 0.01}}
"""Two slots and steps of 10 ms: finished prompts wait where they were computed, and answers last."""


def fixed(prefill: int, decode: int) -> ScalingPolicy:
    limits = {"prefill_max": 4, "decode_max": 4, "budget": 4}
    return make("fixed", {"limits": limits, "prefill": prefill, "decode": decode})


def roles(made: Rig) -> dict[Role, int]:
    """Returns how many engines serve each role, as the router knows them."""
    found = dict.fromkeys((Role.PREFILL, Role.DECODE), 0)
    for role, duty in facts(made).values():
        found[Role(role)] += duty == "active"
    return found


def dies_as_it_switches(serve: Serve, announces: bool) -> list[str]:
    """Has the first engine that is given another role die, before it does anything or once its new role is announced.
    Returns a list in which its id comes then.
    """
    dead: list[str] = []

    def takes(engine: str, role: wire.Role, duty: wire.Duty = "active", lent: bool = False) -> None:
        sim = serve.sims[engine]
        if dead or role == sim.server.info().role:
            type(sim.server).set_role(sim.server, role, duty, lent)
            return
        dead.append(engine)
        if announces:
            type(sim.server).set_role(sim.server, role, duty, lent)
            # after the announcement, which leaves at the end of this turn of the loop
            asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(die))
        else:
            die()

    def die() -> None:
        task = asyncio.create_task(serve.sims.pop(dead[0]).kill())
        serve.tasks.add(task)
        task.add_done_callback(serve.tasks.discard)

    for engine, sim in serve.sims.items():
        sim.server.set_role = partial(takes, engine)  # type: ignore[method-assign]
    return dead


@pytest.mark.parametrize(
    ("prefill", "decode", "announces"),
    [
        pytest.param(1, 3, False, id="a prefill engine, before"),
        pytest.param(1, 3, True, id="a prefill engine, after", marks=pytest.mark.nightly),
        pytest.param(3, 1, False, id="a decode engine, before", marks=pytest.mark.nightly),
        pytest.param(3, 1, True, id="a decode engine, after", marks=pytest.mark.nightly),
    ],
)
async def test_an_engine_that_dies_as_it_switches_leaves_nothing_and_the_plan_goes_on(
    tmp_path: Path, prefill: int, decode: int, announces: bool
) -> None:
    async with rig(tmp_path, []) as made:
        serve = Serve(made, tmp_path, groups=GROUPS, options=OPTIONS)
        await serve.follow()
        await until(lambda: made.connections.ready() is None and len(made.connections.engines()) == 4)
        await until(lambda: all(link.connected for link in made.connections._engines.all()), "all links")
        calm = [text_of(answer) for answer in await asyncio.gather(*(ask(made, n, 120) for n in range(10)))]

        async def find() -> tuple[str, ...]:
            return made.router.addresses

        me = Identity("autoscaler", "a", None, 1)
        scaler = Autoscaler(me, find, Controller(lambda _: fixed(2, 2), GROUPS, "test"), serve, serve)
        scaler.start()
        await until(lambda: scaler.rounds > 0, "a round")

        dead = dies_as_it_switches(serve, announces)
        tasks = [ask(made, number, 120) for number in range(10)]
        sims = list(serve.sims.values())
        await until(lambda: all(sim.server.status().running for sim in sims[2:]), "streams at both engines")
        await until(lambda: any(sim.server.status().leases for sim in sims[:2]), "prompts that wait")
        scaler.controller.policy = fixed(prefill, decode)
        await until(lambda: dead, "an order to switch")
        await until(lambda: dead[0] not in facts(made), "the router forgets the engine")
        await until(lambda: dead[0] not in made.router._autoscaler._sent, "its order is forgotten")
        await serve.follow()
        wanted = {Role.PREFILL: prefill, Role.DECODE: decode}
        await until(lambda: roles(made) == wanted, "the roles are as planned")
        assert serve.targets == {"p": 2, "d": 2}
        assert [text_of(await task) for task in tasks] == calm
        await made.idle()
        assert made.router.status().pool == 0
        for worker in made.router.dispatcher.state.snapshot(0).workers.values():
            assert (worker.slots_used, worker.kv_tokens, worker.prefilling) == (0, 0, 0)
        for sim in serve.sims.values():
            await until(sim.idle, "an idle engine")
        rounds = scaler.rounds
        await until(lambda: scaler.rounds > rounds + 1, "further rounds")
        assert scaler.controller.last is not None
        assert scaler.controller.last.orders == ((), (), ())
        await scaler.stop()
        for sim in serve.sims.values():
            await sim.stop()
