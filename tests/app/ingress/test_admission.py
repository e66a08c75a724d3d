"""Refusals by the product's admission policy, as client and administrator see them: ingress, router and engines."""

import asyncio
from collections import Counter
from pathlib import Path

import httpx

from actors.router.clock import clock_s
from actors.wire import messages as wire
from app.ingress.config import IngressConfig
from policies.admission.registry import DEFAULT
from policies.state import events as ev
from tests.app.ingress.rig import (
    ADMIN_KEY,
    MODEL,
    Rig,
    ScriptedEngine,
    one_slot_each,
    refusal,
    retried_in_a_full_queue,
    rig,
    until,
)
from tests.app.ingress.test_with_sim import Sim

CONFIG = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02, admin_keys=(ADMIN_KEY,))


def pair(directory: Path, prefill_slots: int = 64) -> list[ScriptedEngine]:
    return [
        ScriptedEngine("p", "prefill", directory, slots=prefill_slots),
        ScriptedEngine("d", "decode", directory, step_s=0.02),
    ]


async def post(made: Rig, **more: object) -> httpx.Response:
    return await made.client.post("/v1/chat/completions", json=made.chat(**more))


def choose(made: Rig) -> None:
    """Chooses the product's admission policy; a rig's router has none."""
    made.router.dispatcher.handle(ev.PoliciesChanged(0.0, admission=ev.PolicyChoice(DEFAULT)))


async def measured(made: Rig) -> None:
    """Chooses the policy, and has the router see what the engines do until it knows how long a token takes. Nobody has
    an objective until then.
    """
    choose(made)
    running = [asyncio.create_task(post(made, max_tokens=60)) for _ in range(4)]
    await until(lambda: bool(made.router.dispatcher._gate._rates.lines), "a rate")
    assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}


async def test_an_objective_that_cannot_be_met_is_429_with_the_reason_in_words(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path), CONFIG) as made:
        await measured(made)
        refused = await post(made, slo={"tpot_ms": 1})
        error = refused.json()["error"]
        assert refusal(refused) == (429, "tpot_objective")
        assert error["message"].startswith(
            "The server is overloaded (tpot objective): a token is expected to take "
        )
        assert "and the request allows 1 ms; try again in " in error["message"]
        assert (await post(made)).status_code == 200
        asked = f"/sluice/admin/explain/{refused.headers['x-request-id']}"
        told = await made.client.get(asked, headers={"authorization": f"Bearer {ADMIN_KEY}"})
        [decision] = told.json()["decisions"]
        assert (decision["action"], decision["admission"]["budget_s"]) == ("Reject", 0.001)
        assert decision["admission"]["terms"]["token_s"] > 0.001
        assert made.router.decisions.totals["reject_tpot_objective"] == 1
        await made.idle()


async def test_what_becomes_late_in_the_queue_is_shed(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path, prefill_slots=1), CONFIG) as made:
        await measured(made)
        p = made.engines["p"]
        p.auto = False
        p.received.clear()
        running = asyncio.create_task(post(made))
        await until(lambda: p.of(wire.Prefill), "a prompt to compute")
        # its prompts took no time so far, but this one takes longer than the next request allows
        refused = await post(made, slo={"ttft_ms": 1000})
        assert refusal(refused) == (429, "late")
        assert ", and the request allows 1 s; try again in " in refused.json()["error"]["message"]
        (prefill,) = p.of(wire.Prefill)
        p.finish_prefill(prefill.attempt_id)
        assert (await running).status_code == 200
        assert made.router.decisions.totals["reject_late"] == 1
        await made.idle()


async def test_a_request_whose_engine_dies_is_neither_late_nor_refused_by_a_full_queue(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, one_slot_each(tmp_path), CONFIG, max_queue=1) as made:
        choose(made)
        await retried_in_a_full_queue(made, made.router.dispatcher, clock_s)
        await made.idle()


async def test_at_twice_the_capacity_what_cannot_be_in_time_is_refused_at_its_arrival(tmp_path: Path) -> None:
    """Four slots of 20 ms a token finish eight answers of 25 tokens a second, and 16 a second come."""
    sims: list[Sim] = []
    async with rig(tmp_path, [], CONFIG) as made:
        try:
            sims.append(await Sim.start(made, tmp_path, "p", "prefill"))
            slow = {"decode_base_s": 0.02}
            sims.append(await Sim.start(made, tmp_path, "d", "decode", slots=4, timing=slow))
            await until(lambda: len(made.connections.engines()) == 2 and made.connections.ready() is None)
            await measured(made)
            sent: list[asyncio.Task[httpx.Response]] = []
            for _ in range(40):
                sent.append(asyncio.create_task(post(made, max_tokens=25, slo={"ttft_ms": 500})))
                await asyncio.sleep(1 / 16)
            answers = await asyncio.gather(*sent)
            counts = Counter(
                refusal(answer) if answer.status_code != 200 else (200, "") for answer in answers
            )
            # some may be late beside them, on a machine that is slower than it was
            assert set(counts) <= {(200, ""), (429, "ttft_objective"), (429, "late")}
            assert counts[200, ""] > 4 and counts[429, "ttft_objective"] > 4
            assert made.router.decisions.totals["reject_ttft_objective"] == counts[429, "ttft_objective"]
            await made.idle()
        finally:
            for sim in sims:
                await sim.stop()
