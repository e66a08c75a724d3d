"""`x-sluice-mode`: the engines that serve, with a router and without; the refusals."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.wire import messages as wire
from app.ingress.config import IngressConfig
from tests.app.ingress.rig import MODEL, Rig, ScriptedEngine, pair, rig, until

KEY = "an admin key"
KEYED = IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02, admin_keys=(KEY,))


async def post(made: Rig, mode: str, **headers: str) -> httpx.Response:
    headers = {"x-sluice-mode": mode, **headers}
    return await made.client.post("/v1/chat/completions", json=made.chat(), headers=headers)


def served(engines: list[ScriptedEngine]) -> dict[str, int]:
    """How many requests each engine has computed a part of."""
    return {e.name: len(e.of(wire.Prefill)) + len(e.of(wire.Decode)) for e in engines}


@pytest.mark.parametrize("router", [True, False], ids=["router", "no-router"])
async def test_the_mode_names_the_engines_that_serve(tmp_path: Path, router: bool) -> None:
    engines = [*pair(tmp_path), ScriptedEngine("c", "colocated", tmp_path)]
    async with rig(tmp_path, engines) as made:
        if not router:
            await made.router.stop()
            await until(lambda: not made.connections.router_connected())
        for _ in range(3):
            assert (await post(made, "disaggregated")).status_code == 200
        assert served(engines) == {"p": 3, "d": 3, "c": 0}
        for _ in range(3):
            assert (await post(made, "colocated")).status_code == 200
        assert served(engines) == {"p": 3, "d": 3, "c": 3}
        await until(lambda: not made.connections.live)


async def test_a_kind_that_is_not_there_is_503_and_names_it(tmp_path: Path) -> None:
    engines = pair(tmp_path)
    async with rig(tmp_path, engines) as made:
        answer = await post(made, "colocated")
        assert (answer.status_code, error(answer)["code"]) == (503, "no_colocated_engine")
        assert "retry-after" in answer.headers
        assert served(engines) == {"p": 0, "d": 0}
        await made.idle()


async def test_an_unknown_mode_is_400(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        unknown = await post(made, "both")
        assert (unknown.status_code, error(unknown)["param"]) == (400, "x-sluice-mode")


async def test_a_mode_takes_the_right_to_administer(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path), KEYED) as made:
        refused = [
            await post(made, "disaggregated"),
            await post(made, "disaggregated", authorization="Bearer x"),
        ]
        assert [(answer.status_code, error(answer)["code"]) for answer in refused] == [(401, "admin_key")] * 2
        assert (await post(made, "disaggregated", authorization=f"Bearer {KEY}")).status_code == 200
        assert (await made.client.post("/v1/chat/completions", json=made.chat())).status_code == 200


def error(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    return found
