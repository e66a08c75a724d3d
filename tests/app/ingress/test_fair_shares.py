"""Fair shares as client and administrator see them: ingress, router and scripted engines, without API keys."""

import asyncio
from pathlib import Path

from app.ingress.config import IngressConfig
from app.ingress.tenants.unnamed import unnamed_tenant
from policies.state import events as ev
from tests.app.ingress.rig import ADMIN_KEY, MODEL, ScriptedEngine, rig, until

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
