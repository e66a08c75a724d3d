"""The dashboard as its replica puts it together: where its files lie."""

import tempfile
from pathlib import Path

import pytest

from app.dashboard.replica import Dashboard, Target, folder_of
from app.dashboard.store import RunsConfig
from app.endpoints import DashboardConfig, WireConfig

KEY = "a key of the tests"


async def nobody() -> tuple[str, ...]:
    return ()


def made(config: DashboardConfig, runs: RunsConfig) -> Dashboard:
    ingress = Target(1, "http://127.0.0.1:1")
    return Dashboard(config, runs, "m", {}, ingress, (KEY,), WireConfig(), nobody)


async def test_runs_lie_in_the_dashboards_folder_and_not_where_the_command_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_RUNS", str(tmp_path / "of the command"))
    config = DashboardConfig(port=8002, folder=str(tmp_path / "board"), admin_keys=(KEY,))
    board = made(config, RunsConfig())
    assert board._runs is not None and board._whatif is not None
    assert board._runs.store.folder == tmp_path / "board" / "runs"
    assert board._whatif._folder == tmp_path / "board" / "runs" / ".whatif"
    board = made(config, RunsConfig(folder=str(tmp_path / "named")))
    assert board._runs is not None and board._runs.store.folder == tmp_path / "named"


def test_two_dashboards_of_a_machine_share_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, another = folder_of(DashboardConfig(port=8002)), folder_of(DashboardConfig(port=8012))
    assert one != another and tmp_path in one.parents and tmp_path in another.parents


def test_a_folder_that_is_named_from_where_the_server_works_is_the_same_for_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder_of(DashboardConfig(port=8002, folder="board")) == tmp_path / "board"
