"""Fair shares as client and administrator see them: ingress, router and scripted engines, without API keys."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.wire import messages as wire
from app.ingress.config import IngressConfig
from app.ingress.tenants.unnamed import unnamed_tenant
from policies.state import events as ev
from tests.app.ingress.rig import (
    ADMIN_KEY,
    COSTLY,
    MODEL,
    Rig,
    ScriptedEngine,
    pair,
    rig,
    until,
    users_served,
)

CONFIG = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02, admin_keys=(ADMIN_KEY,))


async def test_users_are_tenants_and_explain_says_whose_turn_it_was(tmp_path: Path) -> None:
    engines = [
        ScriptedEngine("p", "prefill", tmp_path),
        ScriptedEngine("d", "decode", tmp_path, step_s=0.02, slots=1),
    ]
    async with rig(tmp_path, engines, CONFIG) as made:
        dispatcher = made.router.dispatcher
        change = ev.PoliciesChanged(
            0.0,
            dispatch={"overcommit_slots": 0},
            fairness=ev.PolicyChoice("vtc", {"slack_tokens": 0.0}),
        )
        dispatcher.handle(change)

        async def post(**more: object) -> str:
            answer = await made.client.post("/v1/chat/completions", json=made.chat(max_tokens=20, **more))
            assert answer.status_code == 200
            return str(answer.headers["x-request-id"])

        flood = [asyncio.create_task(post(user="many")) for _ in range(6)]
        await until(lambda: dispatcher.state.pool_size >= 3, "a flood in the pool")
        few = await asyncio.gather(*[post(user="few") for _ in range(2)])
        await asyncio.gather(*flood)
        unnamed = await post()

        salt = made.app.connections.salt
        many, known = unnamed_tenant("many", "", salt), set(dispatcher.sharing._outputs)
        assert {many, unnamed_tenant("few", "", salt)} < known and len(known) == 3
        assert [name for name in known if name.startswith("address-")]
        turns = []
        for name in [*few, unnamed]:
            told = await made.client.get(
                f"/sluice/admin/explain/{name}", headers={"authorization": f"Bearer {ADMIN_KEY}"}
            )
            turns.append([made["turn"] for made in told.json()["decisions"]])
        # the flood waits in the pool for the one slot, and so do the two, who are among the first
        assert turns[0][-1]["tenants"] == 2 and list(turns[0][-1]["others"]) == [many]
        assert turns[0][-1]["counter"] <= turns[0][-1]["others"][many]
        # nobody else waited
        assert turns[2] == [None, None]
        await made.idle()


def ask(made: Rig, user: str, **more: Any) -> asyncio.Task[httpx.Response]:
    body = made.chat(user=user, **more)
    return asyncio.create_task(made.client.post("/v1/chat/completions", json=body))


def without_key(made: Rig) -> str:
    """Has the client send no admin key, and returns the header that it has sent."""
    key: str = made.client.headers.pop("authorization")
    return key


@pytest.mark.parametrize(
    ("ceiling", "asked"),
    [("interactive", {"priority": "interactive"}), ("standard", {}), (-1000, {"priority": -1000})],
)
async def test_a_flood_at_the_ceiling_leaves_the_other_user_its_share(
    tmp_path: Path, ceiling: Any, asked: dict[str, Any]
) -> None:
    engines = [
        ScriptedEngine("p", "prefill", tmp_path, auto=False, slots=1),
        ScriptedEngine("d", "decode", tmp_path),
    ]
    async with rig(tmp_path, engines, replace(CONFIG, ceiling=ceiling)) as made:
        dispatcher = made.router.dispatcher
        dispatcher.handle(ev.PoliciesChanged(0.0, fairness=ev.PolicyChoice("vtc", {})))
        flood = [ask(made, "many", **COSTLY, **asked) for _ in range(8)]
        await until(lambda: dispatcher.queue_size == 7, "a flood in the queue")
        few = [ask(made, "few", **COSTLY, **asked) for _ in range(3)]
        await until(lambda: dispatcher.queue_size == 10, "both in the queue")
        first, *next_six = await users_served(made, 7)
        # the flood had the engine to itself; then both have turns until the other has nothing that waits
        assert first == "many"
        assert [sorted(next_six[i : i + 2]) for i in (0, 2, 4)] == [["few", "many"]] * 3
        await users_served(made, 4)
        assert {answer.status_code for answer in await asyncio.gather(*flood, *few)} == {200}
        await made.idle()


async def test_nobody_without_a_key_asks_for_more_than_the_ceiling(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path), CONFIG) as made:
        key = without_key(made)
        # it is parsed in a thread
        large = {"prompt_cache_key": "x" * 70_000}
        for priority, more in ((-1000, {}), ("interactive", {}), (-1, large)):
            answer = await ask(made, "u", priority=priority, **more)
            assert answer.status_code == 403
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("priority_not_allowed", "priority")
            assert error["message"] == (
                "A request without an API key may ask for priorities of 0 and more (class standard), not for less."
                " More is for admin keys, or where the server's ingress.options.ceiling allows it."
            )
        for header in ({"x-sluice-priority": "-1000"}, {"x-sluice-priority": "interactive"}):
            answer = await made.client.post("/v1/chat/completions", json=made.chat(), headers=header)
            assert answer.status_code == 403
        assert not made.engines["p"].received
        allowed = [await ask(made, "u", priority=priority) for priority in (0, "standard", "batch", 1000)]
        assert [answer.status_code for answer in [*allowed, await ask(made, "u")]] == [200] * 5
        # an admin key has no ceiling
        made.client.headers["authorization"] = key
        urgent = [
            await ask(made, "u", priority=priority, **more) for priority, more in ((-1000, {}), (-1, large))
        ]
        assert [answer.status_code for answer in urgent] == [200] * 2
        assert [one.priority for one in made.engines["p"].of(wire.Prefill)][-2:] == [-1000, -1]
    async with rig(tmp_path, pair(tmp_path), replace(CONFIG, ceiling=-1000)) as made:
        without_key(made)
        assert (await ask(made, "u", priority=-1000)).status_code == 200
    async with rig(tmp_path, pair(tmp_path), replace(CONFIG, ceiling="batch")) as made:
        without_key(made)
        # what asks for nothing is lowered
        assert (await ask(made, "u")).status_code == 200
        assert [message.priority for message in made.engines["p"].of(wire.Prefill)] == [1]
        assert (await ask(made, "u", priority="standard")).status_code == 403


async def test_one_anonymous_flood_takes_no_waiting_request_of_others(tmp_path: Path) -> None:
    """A completion of 1,000 prompts, which asks for the most urgent class and then for nothing, in a queue of 64."""
    engines = [
        ScriptedEngine("p", "prefill", tmp_path, auto=False, slots=1),
        ScriptedEngine("d", "decode", tmp_path),
    ]
    async with rig(tmp_path, engines, CONFIG) as made:
        without_key(made)
        dispatcher = made.router.dispatcher
        change = ev.PoliciesChanged(0.0, dispatch={"max_queue": 64}, fairness=ev.PolicyChoice("vtc", {}))
        dispatcher.handle(change)
        waiting = [ask(made, f"user-{i}", **COSTLY) for i in range(20)]
        await until(lambda: dispatcher.queue_size == 19, "requests of others in the queue")
        flood = {"prompt": ["a b c"] * 1000, "max_tokens": 4, "user": "flood"}
        answer = await made.client.post("/v1/completions", json={**flood, "priority": "interactive"})
        assert answer.status_code == 403
        assert (await made.client.post("/v1/completions", json=flood)).status_code == 429
        served = await users_served(made, 20)
        assert len(set(served)) == 20
        assert [(await one).status_code for one in waiting] == [200] * 20
        await made.idle()


@pytest.mark.parametrize("ceiling", ["urgent", -1001, 1001, 0.5, True, None])
def test_a_ceiling_is_a_class_or_a_priority(ceiling: Any) -> None:
    with pytest.raises(
        ValueError, match=r"ceiling is .* interactive, standard, batch or a whole number -1000..1000"
    ):
        replace(CONFIG, ceiling=ceiling)
