"""Begin and end of an experiment are events, whoever has started it: runs are written as the command writes them."""

import os
from pathlib import Path
from typing import Any

import pytest

from app.dashboard.engines import Happened
from app.dashboard.run_marks import RunMarks
from app.dashboard.store import RUN, RunStore, started_s, write
from tests.app.ingress.rig import until

URL = "http://127.0.0.1:8000"
BEGAN_AT = 1_700_000_000.5


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "runs")


def run(store: RunStore, run_id: str | None = None, **keys: Any) -> str:
    """Writes the file of a run, by default of one that this process carries out on the application at URL."""
    if run_id is None:
        run_id, _ = store.new("a burst")
    me = {"pid": os.getpid(), "pid_started": started_s(os.getpid())}
    told = {
        "id": run_id,
        "name": "a burst",
        "state": "running",
        "began_at": BEGAN_AT,
        "url": URL,
        "message": None,
    }
    write(store.path(run_id) / RUN, {**told, **me, **keys})
    return run_id


def marks(*stores: RunStore) -> RunMarks:
    """The marks of a dashboard that has looked for the first time."""
    made = RunMarks(stores, URL, lambda at, happened: None)
    assert made.look() == []
    return made


def texts(found: list[tuple[float, Happened]]) -> list[str]:
    assert {one.kind for _, one in found} <= {"experiment"}
    return [one.text for _, one in found]


def test_a_run_that_begins_and_ends_leaves_two_marks(store: RunStore) -> None:
    watching = marks(store)
    run_id = run(store)
    [(at, began)] = watching.look()
    assert (at, began) == (BEGAN_AT, Happened("experiment", f"experiment a burst began ({run_id})"))
    assert watching.look() == []
    run(store, run_id, state="stopped", message="by SIGINT")
    [(at, ended)] = watching.look()
    assert at > BEGAN_AT
    assert ended == Happened("experiment", "experiment a burst ended: stopped (by SIGINT)")
    assert watching.look() == []


def test_what_runs_already_has_begun_before_and_its_end_is_seen(store: RunStore) -> None:
    run(store, state="done")
    run_id = run(store)
    watching = marks(store)
    run(store, run_id, state="done")
    assert texts(watching.look()) == ["experiment a burst ended: done"]


def test_a_run_that_is_over_before_it_is_seen_leaves_both_marks(store: RunStore) -> None:
    watching = marks(store)
    run_id = run(store, state="failed", message="the disk is full")
    found = watching.look()
    assert texts(found) == [
        f"experiment a burst began ({run_id})", "experiment a burst ended: failed (the disk is full)",
    ]  # fmt: skip
    assert [one.level for _, one in found] == ["info", "warn"]


def test_a_run_whose_process_was_killed_has_ended(store: RunStore) -> None:
    watching = marks(store)
    run_id = run(store)
    watching.look()
    run(store, run_id, pid_started=1.0)
    assert texts(watching.look()) == ["experiment a burst ended: failed (its process has died)"]


def test_a_run_counts_once_it_has_its_file_and_a_deleted_one_is_forgotten(store: RunStore) -> None:
    watching = marks(store)
    run_id, _ = store.new("a burst")
    assert watching.look() == []
    run(store, run_id)
    assert texts(watching.look()) == [f"experiment a burst began ({run_id})"]
    run(store, run_id, state="done")
    watching.look()
    store.delete(run_id)
    assert watching.look() == []


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("http://localhost:8000", True),
        ("http://127.0.0.1:8000/v1", True),
        ("http://127.0.0.1:8001", False),
        ("http://elsewhere.example:8000", False),
        ("http://[not a url", False),
    ],
)
def test_only_runs_on_this_application_leave_marks(store: RunStore, url: str, seen: bool) -> None:
    watching = marks(store)
    run_id = run(store, url=url)
    run(store, run_id, url=url, state="done")
    assert len(watching.look()) == 2 * seen


def test_runs_of_the_command_are_seen_beside_those_of_the_dashboard(store: RunStore, tmp_path: Path) -> None:
    command = RunStore(tmp_path / "of the command")
    watching = marks(store, command, RunStore(command.folder))
    here, there = run(store), run(command)
    assert texts(watching.look()) == [f"experiment a burst began ({one})" for one in (here, there)]


def test_a_folder_that_cannot_be_read_hides_no_other(store: RunStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    watching = marks(RunStore(tmp_path / "file"), store)
    run_id = run(store)
    assert texts(watching.look()) == [f"experiment a burst began ({run_id})"]


async def test_marks_are_made_in_the_background(store: RunStore) -> None:
    seen: list[str] = []
    made = RunMarks([store], URL, lambda at, happened: seen.append(happened.text))
    made.start()
    try:
        await until(lambda: made._folders[0].known is not None, "a first look")
        run_id = run(store)
        await until(lambda: seen == [f"experiment a burst began ({run_id})"], "a mark")
    finally:
        made.stop()
