"""The benchmark of KV reads by deadline in its short form: vLLM engines on two hosts, and the shaped link between them.

It is interrupted when its first cell is kept, and the same command goes on from there.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkout import ROOT
from benchmarks.live import kept
from benchmarks.mfs import link
from benchmarks.mfs.workload import KINDS, Workload
from tests.live.serving import PATIENCE_S
from tests.live.vllm_app import cpu_only

_REASON = link.why_not()
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.vllm,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
    cpu_only("its engines, and the link between them, are those of the measurement on CPUs"),
]

START_S = 900.0


def command(out: Path) -> list[str]:
    # An agent that may be silent for a second is not silent on a busy machine, so that no run is invalid for that.
    options = "--policies unscheduled mfs --loads 0.8 --runs 1 --requests 20 --silent-ms 1000"
    return [sys.executable, "-m", "benchmarks.mfs", *options.split(), "--out", str(out)]


def parts() -> set[Path]:
    return set(kept.FOLDER.glob("mfs-link-*.json"))


def hosts() -> set[int]:
    """Returns the processes that hold hosts."""
    found = subprocess.run(["pgrep", "-f", "benchmarks/hosts/init.py"], capture_output=True, text=True)
    return {int(pid) for pid in found.stdout.split()}


def heed_interrupts() -> None:
    """Undoes what a shell does to a command that it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_it_goes_on_after_an_interruption_and_its_reads_are_chunked_held_and_over_the_link(
    tmp_path: Path,
) -> None:
    before, others = parts(), hosts()
    log = tmp_path / "first.log"
    with log.open("wb") as opened:
        first = subprocess.Popen(
            command(tmp_path), stdout=opened, stderr=opened, cwd=ROOT, preexec_fn=heed_interrupts
        )
        end_s = time.monotonic() + START_S
        while "unscheduled, run 0" not in "".join(path.read_text() for path in parts() - before):
            assert first.poll() is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.5)
        first.send_signal(signal.SIGINT)
        first.wait(PATIENCE_S)
    assert hosts() == others
    assert not (tmp_path / "link.json").exists()

    second = subprocess.run(command(tmp_path), capture_output=True, text=True, cwd=ROOT)
    print(second.stdout)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "unscheduled: 3 engines are ready" not in second.stdout
    # the result is written, so nothing is kept
    assert parts() == before
    whole = json.loads((tmp_path / "link.json").read_text())
    cells: dict[str, Any] = {cell["policy"]: cell for cell in whole["cells"]}
    assert [(row["policy"], row["failures"], row["invalid"]) for row in whole["rows"]] == [
        ("unscheduled", 0, ""),
        ("mfs", 0, ""),
    ]
    workload = Workload()
    for cell in cells.values():
        # one token of each prompt is computed
        assert [cell[kind]["least_cached_tokens"] for kind in KINDS] == [
            workload.tokens(kind) - 1 for kind in KINDS
        ]
        assert cell["wire_mb"] >= sum(cell[kind]["read_mb"] for kind in KINDS)
    p2d = cells["mfs"]["stages"]["p2d"]
    assert (p2d["flows"], cells["mfs"]["unscheduled"]) == (20, {})
    assert p2d["chunks"] > 20
    assert p2d["held_s"] > 0
    assert hosts() == others
