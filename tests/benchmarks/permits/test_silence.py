"""The sweep of an agent's silence in its short form."""

import os
from dataclasses import asdict

import pytest

from actors.engine.cores import usable_cores
from benchmarks.document import OTHERS
from benchmarks.permits import agents, silence


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "SETTLE_S", 0.1)
    monkeypatch.setattr(silence, "SWEEP_S", 0.3)
    monkeypatch.setattr(silence, "CHUNKS", 2)


def test_each_silence_is_measured_on_an_idle_and_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "SILENT_S", (0.02, 60.0))
    made = list(silence.rows())
    busy = silence.BUSY_PER_CORE * len(usable_cores())
    assert [(row.silent_s, row.busy) for row in made] == [(0.02, 0), (60.0, 0), (0.02, busy), (60.0, busy)]
    # chunks of 10 ms over one port: as many reads as were open at once, and those that followed
    assert all(row.reads >= silence.OPEN for row in made)
    assert all(0 <= row.unscheduled <= row.reads for row in made)
    # an agent that may be silent for a minute is not given up in a second
    assert [row.unscheduled for row in made if row.silent_s == 60.0] == [0, 0]
    whole = {"rows": [{"name": "lone read of 500 ms, unscheduled", "p50_us": 1.0, "p99_us": 1.0}]}
    shown = list(OTHERS["permits/permits.json"].read(whole | {"silences": [asdict(row) for row in made]}))
    assert [row.name for row in shown[-2:]] == [
        f"agent silent for {ms} ms, all cores busy: reads without permits" for ms in ("20", "60000")
    ]


def test_reads_whose_agent_is_silent_are_counted() -> None:
    """Beats come every 5 ms, and this worker waits for 1 ms."""
    with agents.agents(1) as address:
        row = silence._row(address, 0.001, 0)
    assert row.unscheduled > 0
    assert row.share == row.unscheduled / row.reads


def test_the_processes_beside_end_with_the_block() -> None:
    others = set(_children())
    with silence._busy(2):
        children = set(_children()) - others
    assert len(children) == 2 and not children & set(_children())


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as found:
        return [int(pid) for pid in found.read().split()]
