"""The store of runs: names from outside, damaged files, dead runners, deletion."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.dashboard.store import (
    BEFORE,
    PLAN,
    RUN,
    RunError,
    RunsConfig,
    RunStore,
    default_folder,
    lives,
    same_server,
    started_s,
    write,
)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "runs")


def made(store: RunStore, **keys: object) -> str:
    run_id, folder = store.new("a run")
    (folder / PLAN).write_text("name: a run\n")
    write(folder / RUN, {"id": run_id, "name": "a run", "state": "done", "progress": 1.0, **keys})
    return run_id


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../..",
        "a/b",
        "/etc",
        "",
        ".",
        "20260101T000000-a-abcdef/..",
        "20260101T000000-..-abcdef",
        "\0",
        "a" * 500,
    ],
)
def test_a_name_that_no_run_has_is_refused(store: RunStore, name: str) -> None:
    made(store)
    for ask in (store.path, store.read, store.text, store.delete):
        with pytest.raises(RunError) as refused:
            ask(name)
        assert refused.value.status == 400


def test_a_run_that_is_not_there_and_a_link_to_elsewhere(store: RunStore, tmp_path: Path) -> None:
    with pytest.raises(RunError) as refused:
        store.path("20260101T000000-a-abcdef")
    assert refused.value.status == 404
    store.folder.mkdir()
    (store.folder / "20260101T000000-a-abcdef").symlink_to(tmp_path)
    with pytest.raises(RunError, match="there is no run"):
        store.delete("20260101T000000-a-abcdef")
    assert tmp_path.exists()


def test_names_become_ids_that_are_names_of_files(store: RunStore) -> None:
    for name in ("Policy A/B", "../../x", "ÄÖ", "", "x" * 300, "--"):
        run_id, folder = store.new(name)
        assert folder.parent == store.folder and store.path(run_id) == folder
    assert oct(store.folder.stat().st_mode & 0o777) == "0o700"


def test_runs_are_listed_newest_first_without_what_lists_do_not_show(store: RunStore) -> None:
    first = made(store, pid=1, url="http://x")
    (store.folder / "something else").mkdir()
    (store.folder / "20010101T000000-old-abcdef").mkdir()
    assert [run["id"] for run in store.all()] == [first, "20010101T000000-old-abcdef"]
    assert "pid" not in store.all()[0]
    # the second has no file
    assert store.all()[1]["state"] == "failed" and "cannot be read" in store.all()[1]["message"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"id": '])
def test_a_damaged_file_is_shown_as_failed(store: RunStore, content: str) -> None:
    run_id = made(store)
    (store.path(run_id) / RUN).write_text(content)
    assert store.read(run_id)["state"] == "failed"


def test_a_run_whose_process_has_died_has_failed(store: RunStore) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run_id = made(store, state="running", pid=process.pid, pid_started=started_s(process.pid))
    assert store.read(run_id)["state"] == "running"
    with pytest.raises(RunError, match="stop it first") as refused:
        store.delete(run_id)
    assert refused.value.status == 409
    process.communicate(b"\n")
    assert (store.read(run_id)["state"], store.read(run_id)["message"]) == ("failed", "its process has died")
    (store.path(run_id) / BEFORE).write_text("{}")
    assert "sluice experiment restore" in store.read(run_id)["message"]
    with pytest.raises(RunError, match="not put back"):
        store.delete(run_id)
    (store.path(run_id) / BEFORE).unlink()
    store.delete(run_id)
    assert store.all() == []


def test_a_later_process_of_the_same_number_is_another_one() -> None:
    assert lives(os.getpid(), started_s(os.getpid()))
    assert not lives(os.getpid(), started_s(os.getpid()) - 60)
    for pid in (None, "1", -1, 2**40, 1.5):
        assert not lives(pid, 0.0)


def test_the_bytes_of_all_runs_are_counted(store: RunStore) -> None:
    before = store.size_bytes()
    run_id = made(store)
    (store.path(run_id) / "samples.jsonl").write_bytes(b"x" * 10_000)
    assert store.size_bytes() - before >= 10_000


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="no run can be kept in") as refused:
        RunStore(tmp_path / "file" / "runs").new("x")
    assert refused.value.status == 507


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rate_per_s": 0.0}, "rate_per_s"),
        ({"duration_s": -1.0}, "duration_s"),
        ({"disk_bytes": 10}, "disk_bytes"),
        ({"folder": "relative"}, "absolute path"),
    ],
)
def test_impossible_bounds_are_refused(options, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        RunsConfig(**options)


def test_the_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_RUNS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_folder() == Path("/state/sluice/experiments")
    monkeypatch.setenv("SLUICE_RUNS", "/runs")
    assert default_folder() == Path("/runs")
    # which is the command's alone
    assert RunsConfig().within(Path("/board")).store().folder == Path("/board/runs")
    assert RunsConfig(folder="/named").within(Path("/board")).store().folder == Path("/named")


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.0.0.1:8000/", True),
        ("http://127.0.0.1:8000/v1", True),
        ("http://127.0.0.1:8001", False),
        ("https://127.0.0.1:8000", False),
        ("http://10.0.0.1:8000", False),
        ("http://127.0.0.1:8000@evil.example", False),
        ("http://127.0.0.1:8000/other", False),
        ("http://127.0.0.1:99999", False),
        ("http://[", False),
        ("", False),
        (None, False),
    ],
)
def test_urls_of_one_server(url: object, same: bool) -> None:
    assert same_server(url, "http://127.0.0.1:8000") is same


def test_a_port_that_is_not_written_is_that_of_the_scheme() -> None:
    assert same_server("https://x.example", "https://x.example:443")
    assert not same_server("http://x.example", "http://x.example:443")


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path / "x.json", {"a": 1})
    with pytest.raises(ValueError):
        write(tmp_path / "x.json", {"a": float("nan")})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
