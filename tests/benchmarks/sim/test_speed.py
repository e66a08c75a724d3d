"""The speed command counts what it ran."""

import pytest

from benchmarks.experiments import netkv_common as netkv
from benchmarks.sim import speed
from benchmarks.workloads.record import WorkloadRequest

ROWS = tuple(
    WorkloadRequest(f"r{i}", 0.5 * i, 2048, 10, block_hashes=(1, 2, i + 9, i + 10_009), block_tokens=512)
    for i in range(40)
)


def test_a_line_for_each_eighth_quarter_half_and_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(netkv, "_rows", lambda trace, workload, seed: ROWS)
    speed.main(["--requests", "40"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "requests"
    assert [int(line.split()[0]) for line in lines] == [5, 10, 20, 40]
    events = [int(line.split()[2]) for line in lines]
    assert events == sorted(events)
    assert events[0] > 0
