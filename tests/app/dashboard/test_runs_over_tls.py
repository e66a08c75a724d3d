"""An experiment and a what-if base from a dashboard whose servers speak TLS with a certificate for a name.

Ingress, router, engines and dashboard are in this process; the commands are real.
"""

import asyncio
from pathlib import Path

import pytest
import yaml

from app.dashboard.config import Settings
from app.dashboard.replica import Target, certificates_of
from app.dashboard.runs import Runs
from app.dashboard.store import RunError, RunsConfig
from app.dashboard.whatif import WhatIf
from app.ingress.http.listener import ListenerConfig
from app.ingress.tokenizer import WordCodec
from tests.actors.wire.certificates import Authority
from tests.app.dashboard.parts import dashboard
from tests.app.ingress.rig import ADMIN_KEY, MODEL, pair, rig, until

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

PLAN = {
    "name": "over tls",
    "load": {
        "classes": {"standard": {"prompt_tokens": 8, "output_tokens": 4}},
        "phases": [{"name": "all", "for_s": 3, "rate_per_s": 4}],
    },
    "actions": [{"at_s": 1, "policy": {"decode": "netkv"}}],
}


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
async def test_a_certificate_for_a_name_is_taken_where_the_dashboard_tells_it(
    tmp_path: Path, told: bool
) -> None:
    folder = Authority().member(tmp_path / "tls", "sluice.example.org")
    files = {"tls_cert": str(folder / "tls.crt"), "tls_key": str(folder / "tls.key")}
    listener = ListenerConfig(port=0, **files)
    async with (
        rig(tmp_path, pair(tmp_path), listener=listener, codec=WordCodec(32_000)) as made,
        dashboard(tmp_path, made.router, model=MODEL, **files) as board,
    ):
        await until(lambda: len(board.feed.ingresses) == 1, "an ingress")
        await until(lambda: board.feed.registry.missing is None, "the sums of its figures")
        port, board_port = made.listener.port, board.server.port
        assert port is not None and board_port is not None
        settings = Settings("127.0.0.1", board_port, MODEL, "0", tmp_path, **files)
        target = Target(port, f"https://127.0.0.1:{port}", files["tls_cert"])
        certificates = certificates_of(settings, target) if told else {}
        config = RunsConfig(folder=str(tmp_path / "runs"))
        runs = Runs(config, target.url, settings.url, ADMIN_KEY, certificates)
        whatif = WhatIf(config, target.url, ADMIN_KEY, certificates)
        try:
            if not told:
                with pytest.raises(RunError, match="CERTIFICATE_VERIFY_FAILED"):
                    await runs.start(yaml.safe_dump(PLAN))
                return
            before = made.router.dispatcher.decode.name
            run = await runs.start(yaml.safe_dump(PLAN))
            while (ended := runs.store.read(run["id"]))["state"] == "running":
                await asyncio.sleep(0.2)
            assert (ended["state"], ended["summary"]["failed"]) == ("done", 0), ended
            assert made.router.dispatcher.decode.name == before != "netkv"
            detail = await runs.detail(run["id"])
            assert not [one for one in detail["actions"] if "missing" in one["what"]], detail["actions"]
            assert any(detail["samples"]["server_tokens_per_s"])
            # all questions were answered: only a journal is missing here
            with pytest.raises(RunError, match="no request has ended lately"):
                await whatif.base()
        finally:
            await runs.close()
            await whatif.close()
