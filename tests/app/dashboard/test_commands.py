"""The commands of the dashboard: their bound and their end hold for processes that are still being started, too."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from app.dashboard import commands
from app.dashboard.commands import MOST_AT_ONCE, Access, Commands
from app.dashboard.config import Settings
from app.dashboard.replica import Target, certificates_of
from app.dashboard.store import RunError
from tests.app.dashboard.starting import Starting


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Starting:
    made = Starting("echo []")
    monkeypatch.setattr(commands, "spawn", made.spawn)
    return made


async def test_the_bound_holds_for_commands_that_are_still_being_started(starting: Starting) -> None:
    made = Commands()
    asked = [asyncio.create_task(made.ask_json(["x"], 30)) for _ in range(MOST_AT_ONCE)]
    await starting.asked.wait()
    with pytest.raises(RunError, match="other questions") as refused:
        await made.ask_json(["x"], 30)
    assert refused.value.status == 429
    starting.go.set()
    assert await asyncio.gather(*asked) == [[]] * MOST_AT_ONCE
    # and their slots are free again
    assert await made.ask_json(["x"], 30) == []
    assert len(starting.processes) == MOST_AT_ONCE + 1


async def test_a_command_that_fails_to_start_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*_: Any, **__: Any) -> Any:
        raise RunError(503, "no process can be started")

    monkeypatch.setattr(commands, "spawn", none)
    made = Commands()
    for _ in range(MOST_AT_ONCE + 1):
        with pytest.raises(RunError, match="no process"):
            await made.ask(["x"], 30)


async def test_a_command_that_is_still_being_started_ends_with_the_server(starting: Starting) -> None:
    starting.script = "sleep 60"
    made = Commands()
    asked = asyncio.create_task(made.ask(["x"], 60))
    await starting.asked.wait()
    await made.close()
    starting.go.set()
    with pytest.raises(RunError, match="is stopping"):
        await asyncio.wait_for(asked, 20)
    assert [process.returncode for process in starting.processes] == [-9]


def test_commands_are_told_the_certificates_of_the_servers_and_no_others(tmp_path: Path) -> None:
    def settings(cert: str | None) -> Settings:
        return Settings("0.0.0.0", 8002, "m", "0", tmp_path, tls_cert=cert)

    assert certificates_of(settings(None), Target(8000, "http://127.0.0.1:8000")) == {}
    found = certificates_of(settings("/b.pem"), Target(8000, "https://127.0.0.1:8000", "/a.pem"))
    assert found == {"https://127.0.0.1:8000": "/a.pem", "https://127.0.0.1:8002": "/b.pem"}
    environment = Access("k", found).environment()
    assert json.loads(environment["SLUICE_SERVER_CERTS"]) == found and environment["SLUICE_ADMIN_KEY"] == "k"
    assert "SLUICE_SERVER_CERTS" not in Access().environment()
