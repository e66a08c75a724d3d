"""A refusal by the admission policy, as client and administrator see it: ingress, router and scripted engines."""

import asyncio
from pathlib import Path

import httpx

from app.ingress.config import IngressConfig
from policies.state import events as ev
from tests.app.ingress.rig import ADMIN_KEY, MODEL, Rig, ScriptedEngine, rig, until

CONFIG = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02, admin_keys=(ADMIN_KEY,))


def pair(directory: Path) -> list[ScriptedEngine]:
    return [ScriptedEngine("p", "prefill", directory), ScriptedEngine("d", "decode", directory, step_s=0.02)]


async def post(made: Rig, **more: object) -> httpx.Response:
    return await made.client.post("/v1/chat/completions", json=made.chat(**more))


async def measured(made: Rig) -> None:
    """Chooses the policy, and has the router see what the engines do until it knows how long a token takes."""
    dispatcher = made.router.dispatcher
    dispatcher.handle(ev.PoliciesChanged(0.0, admission=ev.PolicyChoice("by_wait")))

    running = [asyncio.create_task(post(made, max_tokens=60)) for _ in range(4)]
    await until(lambda: bool(dispatcher._gate._rates.lines), "a rate")
    assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}


async def test_an_objective_that_cannot_be_met_is_429_with_the_reason_in_words(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path), CONFIG) as made:
        await measured(made)
        refused = await post(made, slo={"tpot_ms": 1})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (429, "tpot_objective")
        assert error["message"].startswith(
            "The server is overloaded (tpot objective): a token is expected to take "
        )
        assert "and the request allows 1 ms; try again in " in error["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert (await post(made)).status_code == 200
        asked = f"/sluice/admin/explain/{refused.headers['x-request-id']}"
        told = await made.client.get(asked, headers={"authorization": f"Bearer {ADMIN_KEY}"})
        [decision] = told.json()["decisions"]
        assert (decision["action"], decision["admission"]["budget_s"]) == ("Reject", 0.001)
        assert decision["admission"]["terms"]["token_s"] > 0.001
        assert made.router.decisions.totals["reject_tpot_objective"] == 1
        await made.idle()
