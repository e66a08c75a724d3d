"""Experiments of the dashboard, with a stand-in for the command: watching a run, and what cannot be written."""

import asyncio
import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.dashboard import runs as module
from app.dashboard.runs import KEPT_S, Runs
from app.dashboard.store import BEFORE, PLAN, RUN, RunError, RunsConfig, RunStore, started_s, write
from tests.app.dashboard.starting import Starting
from tests.benchmarks.live.experiment.test_restore import ANSWERS, left
from tests.benchmarks.told_server import told_server


class Shown:
    """A stand-in for the commands: it counts how often a run was read."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ask_json(self, arguments: Sequence[str], limit_s: float) -> Any:
        self.asked.append(arguments[2])
        await asyncio.sleep(0.01)
        return {"run": {"state": "of then"}, "samples": {"t": [len(self.asked)]}}


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(RunsConfig(folder=str(tmp_path / "runs")), "http://127.0.0.1:1")


def running(runs: Runs, progress: float = 0.1, state: str = "running", run_id: str | None = None) -> str:
    if run_id is None:
        run_id, folder = runs.store.new("a run")
        (folder / PLAN).write_text("name: a run\n")
    me = {"pid": os.getpid(), "pid_started": started_s(os.getpid())}
    content = {"id": run_id, "name": "a run", "state": state, "progress": progress, **me}
    write(runs.store.folder / run_id / RUN, content)
    return run_id


async def test_pages_that_watch_a_run_share_one_reading(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, now = Shown(), [100.0]
    monkeypatch.setattr(runs, "_commands", shown)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    run_id = running(runs)
    found = await asyncio.gather(*(runs.detail(run_id) for _ in range(3)))
    assert len(shown.asked) == 1 and found[0]["samples"] == {"t": [1]}
    # how far it is comes from its file each time
    now[0] += KEPT_S - 0.1
    running(runs, 0.5, run_id=run_id)
    assert (await runs.detail(run_id))["run"]["progress"] == 0.5
    assert len(shown.asked) == 1
    now[0] += 0.1
    assert (await runs.detail(run_id))["samples"] == {"t": [2]}
    # another run does not take its place, and its end is read at once
    other = running(runs, state="done")
    await runs.detail(other)
    await runs.detail(run_id)
    assert shown.asked == [run_id, run_id, other]
    running(runs, 1.0, "done", run_id)
    assert (await runs.detail(run_id))["run"] == {"state": "of then"}
    assert shown.asked[3:] == [run_id]


async def test_a_plan_lies_beside_the_runs_and_not_on_another_disk(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = Starting("""echo '{"event": "refused", "problems": ["seen"]}'""")
    starting.go.set()
    monkeypatch.setattr(module, "spawn", starting.spawn)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(RunError, match="seen"):
        await runs.start("name: x\n")
    assert os.path.dirname(starting.arguments[0][2]) == str(runs.store.folder)
    # it is gone, and lists of runs have not seen it
    assert os.listdir(runs.store.folder) == []
    assert os.stat(runs.store.folder).st_mode & 0o077 == 0


async def test_a_disk_that_takes_no_plan_is_refused_in_words(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    with pytest.raises(RunError, match="No space left on device; make room") as refused:
        await runs.start("name: x\n")
    assert refused.value.status == 507
    # and the next one may come
    with pytest.raises(RunError, match="make room"):
        await runs.start("name: x\n")


async def test_the_end_of_the_server_ends_a_run_that_is_being_started(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = Starting("sleep 60")
    monkeypatch.setattr(module, "spawn", starting.spawn)
    begun = asyncio.create_task(runs.start("name: x\n"))
    await asyncio.wait_for(starting.asked.wait(), 20)
    with pytest.raises(RunError, match="is being started: try again"):
        await runs.stop_asked()
    await runs.close()
    starting.go.set()
    with pytest.raises(RunError, match="is stopping"):
        await asyncio.wait_for(begun, 20)
    assert [process.returncode for process in starting.processes] == [-9]


async def test_an_experiment_of_a_command_on_this_application_keeps_others_out(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command's runs are not this server's to list, but two loads at a time would spoil each other."""
    monkeypatch.setenv("SLUICE_RUNS", str(tmp_path / "commands"))
    monkeypatch.setattr(runs, "_commands", Shown())
    commands = RunStore(tmp_path / "commands")

    def by_hand(url: str) -> str:
        run_id, folder = commands.new("by hand")
        me = {"pid": os.getpid(), "pid_started": started_s(os.getpid())}
        write(folder / RUN, {"id": run_id, "name": "by hand", "state": "running", "url": url, **me})
        return run_id

    by_hand("http://127.0.0.1:2")
    with pytest.raises(RunError, match="no experiment is running"):
        await runs.stop_asked()
    mine = by_hand("http://127.0.0.1:1")
    with pytest.raises(RunError, match=f"experiment {mine} is running") as refused:
        await runs.start("name: x\n")
    assert refused.value.status == 409
    with pytest.raises(RunError, match="stop it where it was started"):
        await runs.stop_asked()
    listed = await runs.all()
    assert (listed["runs"], listed["running"], listed["folder"]) == ([], None, str(tmp_path / "runs"))


async def test_at_its_start_it_puts_back_what_is_of_its_application_and_no_other_one_learns_its_key(
    tmp_path: Path,
) -> None:
    config = RunsConfig(folder=str(tmp_path / "runs"))
    with told_server(ANSWERS) as mine, told_server(ANSWERS) as other:
        runs = Runs(config, mine.url, "http://127.0.0.1:1", "key of mine")
        own, foreign = left(runs.store, mine.url), left(runs.store, other.url)
        elsewhere = left(runs.store, mine.url, "http://127.0.0.1:2")
        runs.start_up()
        await asyncio.wait_for(asyncio.gather(*runs._background), 60)
        assert {key for _, _, key in mine.asked} == {"key of mine"}
        assert other.asked == []
    assert [(one / BEFORE).exists() for one in (own, foreign, elsewhere)] == [False, True, True]
