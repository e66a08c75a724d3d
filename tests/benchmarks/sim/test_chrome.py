"""Chrome trace: valid JSON, one lane per span at a time, times in microseconds."""

import json
from pathlib import Path

from benchmarks.sim.chrome import write
from benchmarks.sim.records import RequestRecord, RunResult, StepStats


def record(attempt_id: str, begin: float, end: float) -> RequestRecord:
    return RequestRecord(
        attempt_id, "standard", 10, 2, begin, "p", "d", False, begin, begin, begin + 1, begin + 1, begin + 1,
        begin + 2, begin + 3, end,
    )  # fmt: skip


def test_spans_of_a_run(tmp_path: Path) -> None:
    waits = RequestRecord("w", "standard", 10, 2, 0.0, "p", prefill_started_s=0.0)
    whole = RequestRecord(
        "c", "standard", 10, 2, 0.0, "x", "x", True, 0.0, 1.0, first_token_s=2.0, finished_s=3.0
    )
    result = RunResult([record("a", 0.0, 5.0), record("b", 2.5, 9.0), waits, whole], StepStats(), 9.0)
    write(result, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    workers = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert sorted(workers.values()) == ["d", "p", "x"]
    shown = [
        (workers[e["pid"]], e["cat"], e["name"], e["tid"], e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X"
    ]
    assert shown == [
        ("d", "transfer", "a", 1, 1e6, 1e6),
        ("d", "decode", "a", 1, 2e6, 3e6),
        ("d", "transfer", "b", 2, 3.5e6, 1e6),
        ("d", "decode", "b", 2, 4.5e6, 4.5e6),
        ("p", "prefill", "a", 1, 0.0, 1e6),
        ("p", "prefill", "b", 1, 2.5e6, 1e6),
        ("x", "prefill", "c", 1, 1e6, 1e6),
        ("x", "decode", "c", 1, 2e6, 1e6),
    ]
