"""Runs read back from their folders, and their report as a file that opens by itself."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from app.dashboard.store import ACTIONS, PLAN, REQUESTS, RUN, SAMPLES, RunError, RunStore, write
from benchmarks.live.experiment import report
from benchmarks.live.experiment.cli import command
from benchmarks.live.experiment.plan import Bounds, described, read
from benchmarks.live.experiment.stored import compared, detail, load

TEXT = """
name: two arms
summary: <script>alert(1)</script>
load:
  classes: {interactive: {ttft_slo_ms: 200}}
  phases: [{name: a, for_s: 12, rate_per_s: 2}]
arms: {x: {policy: {decode: round_robin}}, y: {policy: {decode: composition}}}
"""


def made(store: RunStore, killed: bool = False, text: str = TEXT) -> str:
    """Writes a run of 24 requests in each trial; the second trial's are 30 ms slower."""
    plan = read(text, Bounds())
    run_id, folder = store.new(plan.name)
    trials = [
        {"arm": one.arm, "repeat": one.repeat, "began_s": 15.0 * n, "load_s": 12.0}
        for n, one in enumerate(plan.trials)
    ]
    run = {
        "id": run_id, "name": plan.name, "state": "running" if killed else "done", "began_at": 0.0, "took_s": 30.0,
        "progress": 1.0, "phase": "", "message": None, "pid": 2**30, "pid_started": 0.0,
        "summary": None if killed else {"requests": 48, "failed": 1, "problems": {"<b>status 503</b>": 1}},
        "plan": described(plan, 48), "trials": [] if killed else trials, "versions": {"commit": "abc"},
    }  # fmt: skip
    write(folder / RUN, run)
    (folder / PLAN).write_text(text)
    rows = [
        {
            "trial": trial, "number": i, "phase": "a", "request_class": "interactive", "prompt_tokens": 5,
            "output_tokens": 11, "planned_s": i / 2, "ttft_slo_s": 0.2, "tpot_slo_s": None, "id": f"r{i}",
            "sent_s": i / 2, "first_s": i / 2 + 0.1 + 0.03 * trial, "last_s": i / 2 + 0.2 + 0.03 * trial,
            "status": 200, "cached_tokens": 0, "problem": None,
        }
        for trial in range(len(plan.trials)) for i in range(24)
    ]  # fmt: skip
    (folder / REQUESTS).write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"cut')
    samples = [
        {
            "trial": trial,
            "at_s": float(s),
            "t": 15.0 * trial + s,
            "engines_active": 3,
            "queued": 0,
            "kv_usage_max": 0.5,
        }
        for trial in range(len(plan.trials))
        for s in range(13)
    ]
    (folder / SAMPLES).write_text("".join(json.dumps(row) + "\n" for row in samples))
    action = {"at_s": 1.0, "trial": 0, "trial_s": 1.0, "what": "drain <i>decode</i>"}
    (folder / ACTIONS).write_text(json.dumps(action) + "\n")
    return run_id


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "runs")


class Page(HTMLParser):
    """The parts of a page that a browser would load, run and show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_opens_from_disk_and_shows_texts_as_text(store: RunStore, tmp_path: Path) -> None:
    run_id = made(store)
    file = tmp_path / "report.html"
    arguments = command_line(
        "report", run_id, "--html", str(file), "--png", str(tmp_path / "r.png"), "--runs", str(store.folder)
    )
    assert command.run(arguments) == 0
    page = Page(file.read_text("utf-8"))
    assert not {"script", "iframe", "link", "object"} & set(page.tags)
    assert all(url.startswith(("data:image/png;base64,", "#")) for url in page.loads) and page.loads
    for shown in (
        "<script>alert(1)</script>",
        "<i>decode</i>",
        "<b>status 503</b>",
        "TTFT p95, ms",
        "x",
        "y",
        "abc",
    ):
        assert shown in page.text
    # 30 ms more, and what it is made from
    assert re.search(r"130\.0 \(\+30", page.text) and "time blocks" in page.text
    with Image.open(tmp_path / "r.png") as drawn:
        assert drawn.width > 500 and drawn.height > 500


def command_line(*words: str):
    import argparse

    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args(list(words))


def test_the_report_as_data_and_as_picture(store: RunStore) -> None:
    run = load(store, made(store))
    told = json.loads(json.dumps(report.as_json(run), allow_nan=False))
    assert told["columns"] == [f"two arms {told['run']['id'][9:15]} / {arm}" for arm in "xy"]
    assert next(line for line in told["table"] if line["figure"] == "goodput")["values"] == [2.0, 2.0]
    with Image.open(io.BytesIO(report.as_png(run))) as drawn:
        # a plot with lines has more than its background
        assert len(drawn.convert("RGB").getcolors(1 << 20) or []) > 8


def test_a_comparison_of_two_runs(store: RunStore) -> None:
    one_arm = TEXT[: TEXT.index("arms:")]
    first, second = made(store, text=one_arm), made(store, text=one_arm)
    told = compared(store, [first, second])
    assert [run["id"] for run in told["runs"]] == told["keys"] == [first, second]
    assert len(set(told["columns"])) == 2 and set(told["samples"]) == {first, second}
    for line in told["table"]:
        assert line["difference"] == 0.0 and line["interval"] == [0.0, 0.0]
    assert told["samples"][first]["requests_per_s"][5] == 2.0
    with pytest.raises(RunError, match="12 columns are more than 8"):
        compared(store, [made(store) for _ in range(6)])


def test_a_killed_run_still_has_its_figures(store: RunStore) -> None:
    run_id = made(store, killed=True)
    told = detail(store, run_id)
    assert told["run"]["state"] == "failed" and told["requests"]["n"] == 48
    assert [column.name.rpartition(" / ")[2] for column in load(store, run_id).columns()] == ["x", "y"]
    assert len(told["samples"]["t"]) == len(told["samples"]["queued"]) == 26


@pytest.mark.parametrize("killed", [True, False])
def test_trials_that_a_run_has_not_noted_yet_stand_one_after_the_other(store: RunStore, killed: bool) -> None:
    # trials of 12 s that began at 0 and at 15 s
    told = detail(store, made(store, killed))
    assert told["samples"]["t"] == [float(s) for s in (*range(13), *range(15, 28))]


def test_a_trial_without_a_sample_began_when_the_load_before_it_had_ended(store: RunStore) -> None:
    run_id = made(store, killed=True)
    file = store.path(run_id) / SAMPLES
    first = [line for line in file.read_text().splitlines(True) if json.loads(line)["trial"] == 0]
    file.write_text("".join(first))
    assert [trial.began_s for trial in load(store, run_id).trials] == [0.0, 12.0]


def test_runs_without_a_request_cannot_be_compared(store: RunStore) -> None:
    run_id = made(store)
    folder = store.path(run_id)
    for name in (REQUESTS, SAMPLES):
        (folder / name).write_text("")
    write(folder / RUN, {**json.loads((folder / RUN).read_text()), "trials": []})
    with pytest.raises(RunError, match="nothing to compare"):
        compared(store, [run_id])
    assert "no request was sent" in report.as_html(load(store, run_id))


@pytest.mark.parametrize("killed", [True, False])
def test_damaged_files_are_named(store: RunStore, killed: bool) -> None:
    run_id = made(store, killed)
    (store.path(run_id) / REQUESTS).write_text('{"trial": "x"}\n' if killed else '{"trial": 7}\n')
    with pytest.raises(RunError, match="damaged"):
        load(store, run_id)
