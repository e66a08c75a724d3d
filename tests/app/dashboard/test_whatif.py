"""Questions about changes of what runs: each base has a folder of its own, and one being started can be stopped.

The command is a stand-in; `test_run_routes.py` asks the real one, `tests/benchmarks/whatif` tests what it says.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from app.dashboard import whatif
from app.dashboard.auth import Keys, Sessions
from app.dashboard.config import Settings
from app.dashboard.guard import Guard
from app.dashboard.run_routes import routes
from app.dashboard.store import RunError, RunsConfig
from app.dashboard.whatif import BY_HAND, MOST_BASES, QUESTION, WhatIf
from tests.app.dashboard.starting import Starting


class Told:
    """A stand-in for the commands: it writes a base as `sluice simulate --from-live` does, or fails."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.fails = False

    async def ask_json(self, arguments: Sequence[str], limit_s: float) -> Any:
        folder = Path(arguments[arguments.index("--write") + 1])
        self.folders.append(folder)
        (folder / "workload.jsonl").write_text(f"{len(self.folders)}\n")
        if self.fails:
            raise RunError(400, "no request has ended lately")
        return {"text": "a: 1\n", "facts": {}, "problems": [], "measured": {}, "more": 1}


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Starting:
    made = Starting("true")
    monkeypatch.setattr(whatif, "spawn", made.spawn)
    return made


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def made(tmp_path: Path, told: Told, starting: Starting) -> WhatIf:
    found = WhatIf(RunsConfig(folder=str(tmp_path / "runs")), "http://127.0.0.1:1")
    found._commands = told  # type: ignore[assignment]
    return found


async def ended(made: WhatIf) -> None:
    assert made._task is not None
    await asyncio.wait_for(asyncio.shield(made._task), 20)


async def test_a_question_is_asked_in_the_folder_of_the_base_that_it_names(
    made: WhatIf, told: Told, starting: Starting
) -> None:
    starting.go.set()
    first, second = await made.base(), await made.base()
    assert first["base"] != second["base"] and set(first) == {"base", "text", "facts", "problems", "measured"}
    # the older base is asked about after a newer one was read: its own workload is there
    await made.start("a: 2\n", None, first["base"])
    await ended(made)
    folder = Path(starting.arguments[0][1]).parent
    assert folder == told.folders[0] and folder.name == first["base"]
    assert (folder / QUESTION).read_text() == "a: 2\n" and (folder / "workload.jsonl").read_text() == "1\n"
    # without a base nothing is beside the file
    await made.start("a: 3\n", None)
    await ended(made)
    by_hand = Path(starting.arguments[1][1]).parent
    assert by_hand.name == BY_HAND
    assert sorted(one.name for one in by_hand.iterdir()) == ["changes.json", QUESTION]


async def test_only_the_bases_used_last_are_kept(made: WhatIf, told: Told, starting: Starting) -> None:
    starting.go.set()
    first = (await made.base())["base"]
    others = [(await made.base())["base"] for _ in range(MOST_BASES - 1)]
    await made.start("a: 1\n", None, first)
    await ended(made)
    await made.base()
    assert told.folders[0].exists() and not told.folders[1].exists()
    with pytest.raises(RunError, match="read it anew") as refused:
        await made.start("a: 1\n", None, others[0])
    assert refused.value.status == 404
    # and the refusal keeps nobody out
    await made.start("a: 1\n", None, others[1])
    await ended(made)


async def test_a_base_that_cannot_be_read_leaves_nothing(made: WhatIf, told: Told) -> None:
    told.fails = True
    with pytest.raises(RunError, match="no request has ended"):
        await made.base()
    assert not told.folders[0].exists()


@pytest.mark.parametrize("base", ["..", "by-hand", "", 7, {}, "0" * 16 + "/..", "0" * 15 + "G"])
async def test_a_name_that_no_base_has_is_refused(made: WhatIf, base: object) -> None:
    with pytest.raises(RunError) as refused:
        await made.start("a: 1\n", None, base)
    assert refused.value.status == 400


async def test_a_question_is_stopped_while_its_process_is_being_started(
    made: WhatIf, starting: Starting
) -> None:
    starting.script = "sleep 60"
    await made.start("a: 1\n", None)
    await starting.asked.wait()
    stopping = asyncio.create_task(made.stop())
    await asyncio.sleep(0)
    starting.go.set()
    await asyncio.wait_for(stopping, 20)
    assert made.state()["state"] == "failed" and made.state()["message"] == "the simulation was stopped"
    assert [process.returncode for process in starting.processes] == [-9]
    # the next question is not stopped with it
    starting.script = "true"
    await made.start("a: 1\n", None)
    await ended(made)
    assert "left no answer" in made.state()["message"]


async def test_a_viewer_has_no_base_read(made: WhatIf, told: Told, tmp_path: Path) -> None:
    runs: Any = None
    keys = Keys(("a viewer's key",), ("an admin's key",))
    settings = Settings("127.0.0.1", 0, "m", "0", tmp_path)
    guard: Any = Guard(Starlette(routes=routes(runs, made)), Sessions(keys, 60.0), settings)
    transport = httpx.ASGITransport(guard)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for method, key, status in (
            ("POST", "a viewer's key", 403),
            ("GET", "a viewer's key", 405),
            ("POST", "an admin's key", 200),
        ):
            headers = {"authorization": f"Bearer {key}"}
            answer = await http.request(method, "/api/whatif/base", headers=headers)
            assert answer.status_code == status, answer.text
    assert len(told.folders) == 1


def answered(arguments: Sequence[str]) -> None:
    """Writes an answer where the command was told to."""
    answer = Path(arguments[arguments.index("--json") + 1])
    means = {"base": {"ttft_mean_s": 1.0}}
    answer.write_text(json.dumps({"figures": {"ttft_mean_s": "TTFT mean, s"}, "means": means}))


async def test_the_answer_is_that_of_the_folder(made: WhatIf, starting: Starting) -> None:
    base = (await made.base())["base"]
    await made.start("a: 1\n", None, base)
    await starting.asked.wait()
    answered(starting.arguments[0])
    starting.go.set()
    await ended(made)
    result = made.state()["result"]
    assert result["columns"] == [{"name": "base", "figures": {"ttft_mean_s": 1.0}}]
    assert result["trust"]["ok"] is False and "nothing was measured of this file" in result["trust"]["text"]
