"""The benchmark of hostile clients: windows, figures and aims made by hand, and short forms on live applications."""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from app.ingress.config import IngressConfig
from benchmarks.document import RESULTS
from benchmarks.hostile import __main__ as hostile_command
from benchmarks.hostile import run as hostile_run
from benchmarks.hostile.clients import FilesError, Kind, allow_files, requests_of
from benchmarks.hostile.report import rows_of
from benchmarks.hostile.run import Plan, begun, measure
from benchmarks.hostile.setups import CONNECTION_BYTES, RAISED, application, budget_bytes, limits
from benchmarks.hostile.streams import Seen, Stream, window
from benchmarks.live.servers import ServerError, running


def test_a_gap_belongs_to_the_window_in_which_it_ends() -> None:
    seen = Seen(
        gaps=[(1.0, 0.05), (2.0, 0.3), (2.5, 0.06), (3.0, 0.9)], firsts=[(2.2, 0.4)], late=[(0.5, 0.7)]
    )
    found = window(seen, 1.0, 3.0)
    assert (found.events, found.longest_gap_s, found.longest_first_s, found.late_s) == (3, 0.3, 0.4, 0.0)
    assert window(seen, 3.0, 4.0).longest_gap_s == 0.9
    with pytest.raises(ValueError, match="no well-behaved stream"):
        window(seen, 4.0, 5.0)


def test_a_stream_notes_its_first_event_apart_and_its_last_wait() -> None:
    seen = Seen()
    stream = Stream(seen, 10.0)
    stream.piece(b"data: {}\n\n", 10.5)
    stream.piece(b": a comment\n\n", 11.0)
    stream.piece(b"data: {}\n\n", 11.5)
    stream.gap(14.5)
    assert seen.firsts == [(10.5, 0.5)]
    assert seen.gaps == [(11.5, 1.0), (14.5, 3.0)]


def test_half_open_requests_lack_a_part() -> None:
    head, half = requests_of("half_open")
    assert b"\r\n\r\n" not in head
    start, _, body = half.partition(b"\r\n\r\n")
    announced = int(start.rpartition(b"content-length: ")[2])
    assert 0.4 < len(body) / announced < 0.6


def test_the_budget_is_that_of_the_connections_that_may_be_open() -> None:
    config = IngressConfig(served_names=("sim",), max_connections_per_address=100)
    shared = (256 + 256 + 16 + 1024) * 2**20
    assert budget_bytes(config, 10) == shared + 10 * CONNECTION_BYTES
    assert budget_bytes(config, 10_000) == shared + 100 * CONNECTION_BYTES
    assert limits("raised").max_connections == RAISED["max_connections"]


def test_too_few_files_are_said_in_words() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(FilesError, match="hard limit of this process"):
        allow_files(hard + 1)


def run_of(**more: Any) -> dict[str, Any]:
    seen = {"events": 10, "longest_gap_s": 0.06, "p99_gap_s": 0.055, "longest_first_s": 0.1, "late_s": 0.001}
    found = {
        "setup": "shipped",
        "kind": "idle",
        "count": 10_000,
        "alone": seen,
        "hostile": seen,
        "failed": {},
    }
    found |= {"most_open": 4160, "outcomes": {"reset": 5840}, "budget_bytes": 100, "left": {}}
    found |= {"rss_before_bytes": 1000, "rss_peak_bytes": 1100, "rss_after_bytes": 1000}
    return found | {"cpu_share_alone": 0.1, "cpu_share_hostile": None} | more


@pytest.mark.parametrize(
    ("more", "missed"),
    [
        ({}, []),
        ({"hostile": {**run_of()["alone"], "longest_gap_s": 0.17}}, ["longest gap, more than alone"]),
        ({"rss_peak_bytes": 1101}, ["growth of the ingress's RSS"]),
        ({"left": {"leases": 1}}, ["requests, leases and connections left"]),
        ({"failed": {"status 503": 2}}, ["well-behaved requests that failed"]),
    ],
)
def test_each_aim_is_judged(more: dict[str, Any], missed: list[str]) -> None:
    rows = list(rows_of(run_of(**more)))
    assert [row.name.partition(": ")[2] for row in rows if row.met is False] == missed
    assert sum(row.met is not None for row in rows) == 4
    assert rows[0].name == "shipped limits, 10,000 idle connections: longest gap alone"


@pytest.mark.parametrize("program", ["pass", "import time; time.sleep(60)"])
def test_streams_that_do_not_begin_are_an_error(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile_run, "BEGIN_S", 1.0)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        with pytest.raises(ServerError, match="have not begun in 1 s"):
            begun(process)
        process.kill()


EXPECTED: dict[Kind, set[str]] = {
    "slow_readers": {"200, open"},
    "half_open": {"no answer, open"},
    "idle": {"no answer, open"},
    "large": {"200, closed"},
}


def test_the_command_keeps_its_result_where_results_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hostile_command.OUT == RESULTS / "hostile"
    monkeypatch.setattr(hostile_command, "OUT", tmp_path / "hostile")
    monkeypatch.setattr(hostile_command, "facts", lambda module, folders: {"code": "x"})
    monkeypatch.setattr("benchmarks.live.machine.at_the_end", lambda machine: machine)
    assert hostile_command.main(["--slow-readers=0", "--half-open=0", "--idle=0", "--large=0"]) == 0
    assert json.loads((tmp_path / "hostile/hostile.json").read_text())["runs"] == []


@pytest.mark.live
@pytest.mark.timeout(300)
def test_all_kinds_in_their_short_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few clients are let in, the streams of others go on, and nothing of the clients stays."""
    monkeypatch.setattr(hostile_run, "WARM_S", 0.5)
    monkeypatch.setattr(hostile_run, "SETTLE_S", 0.5)
    lines: list[str] = []
    # a unix socket's path is short, and pytest's folders are deep
    with (
        tempfile.TemporaryDirectory(prefix="sluice-") as folder,
        running(application("raised", "sim", Path(folder) / "app"), lines.append) as server,
    ):
        for kind, outcomes in EXPECTED.items():
            found = measure(server, "raised", kind, 4, Plan(1.0, 2.0, 2), lines.append)
            assert set(found["outcomes"]) <= outcomes | {"no answer, open"}, lines
            assert sum(found["outcomes"].values()) == found["most_open"] == 4
            assert (found["failed"], found["left"]) == ({}, {})
            assert found["hostile"]["events"] > 0 and found["usage"]
            assert sum(row.met is not None for row in rows_of(found)) == 4
