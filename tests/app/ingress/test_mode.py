"""`x-sluice-mode`: the engines that serve, with a router and without; the refusals."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.wire import messages as wire
from app.ingress.config import IngressConfig
from tests.app.ingress.rig import MODEL, Rig, ScriptedEngine, pair, rig, until


def config(allow_mode: bool = True) -> IngressConfig:
    return IngressConfig(served_names=(MODEL,), sweep_interval_s=0.02, allow_mode=allow_mode)


async def post(made: Rig, mode: str) -> httpx.Response:
    return await made.client.post("/v1/chat/completions", json=made.chat(), headers={"x-sluice-mode": mode})


def served(engines: list[ScriptedEngine]) -> dict[str, int]:
    """How many requests each engine has computed a part of."""
    return {e.name: len(e.of(wire.Prefill)) + len(e.of(wire.Decode)) for e in engines}


@pytest.mark.parametrize("router", [True, False], ids=["router", "no-router"])
async def test_the_mode_names_the_engines_that_serve(tmp_path: Path, router: bool) -> None:
    engines = [*pair(tmp_path), ScriptedEngine("c", "colocated", tmp_path)]
    async with rig(tmp_path, engines, config()) as made:
        if not router:
            await made.router.stop()
            await until(lambda: not made.hub.router_connected())
        for _ in range(3):
            assert (await post(made, "disaggregated")).status_code == 200
        assert served(engines) == {"p": 3, "d": 3, "c": 0}
        for _ in range(3):
            assert (await post(made, "colocated")).status_code == 200
        assert served(engines) == {"p": 3, "d": 3, "c": 3}
        await until(lambda: not made.hub.jobs)


async def test_a_kind_that_is_not_there_is_503_and_names_it(tmp_path: Path) -> None:
    engines = pair(tmp_path)
    async with rig(tmp_path, engines, config()) as made:
        answer = await post(made, "colocated")
        assert (answer.status_code, error(answer)["code"]) == (503, "no_colocated_engine")
        assert "retry-after" in answer.headers
        assert served(engines) == {"p": 0, "d": 0}
        await made.idle()


async def test_an_unknown_mode_is_400_and_one_where_none_is_allowed_403(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path), config(allow_mode=False)) as made:
        unknown, forbidden = await post(made, "both"), await post(made, "disaggregated")
        assert (unknown.status_code, error(unknown)["param"]) == (400, "x-sluice-mode")
        assert (forbidden.status_code, error(forbidden)["code"]) == (403, "mode_not_allowed")
        assert "allow_mode" in error(forbidden)["message"]


def error(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    return found
