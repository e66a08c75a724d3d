"""Putting back what killed runs have left: which servers it is about, and which of them learns which key.

The servers are real ones with given answers: what they were asked, and with which key, is all that is looked at.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from app.admin_key import KeyFile
from app.dashboard.store import BEFORE, RUN, RunStore, write
from benchmarks.live.experiment.cli import command
from benchmarks.live.experiment.guardian import remember
from tests.benchmarks.told_server import Told, told_server

ANSWERS = {"/sluice/admin/policy": json.dumps({"prefill": {"name": "a"}, "decode": {"name": "b"}})}
"""The answers of a server whose policies are as they were before the runs that `left` leaves."""


def left(store: RunStore, url: str, dashboard: str | None = None) -> Path:
    """Leaves a run on the server at `url` that was killed before it put anything back; returns its folder."""
    run_id, folder = store.new("left")
    run = {"id": run_id, "name": "left", "state": "running", "pid": 2**30, "pid_started": 0.0, "url": url}
    write(folder / RUN, run)
    policy = {"decode": {"name": "b", "params": {}}}
    remember(folder, {"url": url, "dashboard": dashboard, "policy": policy})
    return folder


def restore(store: RunStore, *more: str) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(["restore", "--runs", str(store.folder), *more]))


def keys(server: Told) -> set[str | None]:
    return {key for _, _, key in server.asked}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    monkeypatch.setenv("SLUICE_ADMIN_KEY", "key of mine")
    monkeypatch.delenv("SLUICE_BASE_URL", raising=False)
    # key files of servers on this machine are none of ours
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return RunStore(tmp_path / "runs")


@pytest.fixture
def mine() -> Iterator[Told]:
    with told_server(ANSWERS) as server:
        yield server


@pytest.fixture
def other() -> Iterator[Told]:
    with told_server(ANSWERS) as server:
        yield server


def test_a_restore_at_one_server_asks_no_other_one(store: RunStore, mine: Told, other: Told) -> None:
    own, foreign = left(store, mine.url), left(store, other.url)
    assert restore(store, "--url", f"{mine.url}/v1") == 0
    assert keys(mine) == {"key of mine"} and other.asked == []
    assert not (own / BEFORE).exists() and (foreign / BEFORE).exists()


def test_what_went_through_another_dashboard_is_left(store: RunStore, mine: Told) -> None:
    foreign = left(store, mine.url, "http://127.0.0.1:7")
    assert restore(store, "--url", mine.url, "--dashboard", "http://127.0.0.1:8") == 0
    assert mine.asked == [] and (foreign / BEFORE).exists()
    assert restore(store, "--url", mine.url, "--dashboard", "http://127.0.0.1:7/") == 0
    assert keys(mine) == {"key of mine"} and not (foreign / BEFORE).exists()


def test_a_restore_at_all_servers_sends_the_key_of_the_environment_to_one(
    store: RunStore,
    mine: Told,
    other: Told,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLUICE_BASE_URL", mine.url)
    own, foreign = left(store, mine.url), left(store, other.url)
    assert restore(store) == 1
    assert keys(mine) == {"key of mine"} and other.asked == []
    assert not (own / BEFORE).exists() and (foreign / BEFORE).exists()
    assert f"give `--url {other.url}`" in capsys.readouterr().out
    # the other one keeps a key of its own in a file on this machine
    port = urlsplit(other.url).port
    assert port is not None
    key = KeyFile(port).take()
    assert restore(store) == 0
    assert keys(other) == {key} and not (foreign / BEFORE).exists()


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"url": 7}'])
def test_a_damaged_file_is_named_and_nobody_is_asked(
    store: RunStore, mine: Told, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = left(store, mine.url)
    (folder / BEFORE).write_text(content)
    assert restore(store, "--url", mine.url) == 1
    assert folder.name in capsys.readouterr().out and mine.asked == []
