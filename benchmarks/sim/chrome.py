"""Writes a run as a Chrome trace, for chrome://tracing or Perfetto, with spans for prefill, transfer and decode.

The file is a JSON object with `traceEvents`. A span is a complete event (ph "X") whose ts and dur are microseconds of
virtual time. A worker is a process of the trace. Its spans that overlap are drawn on different lanes, the threads of
that process.
"""

import heapq
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.sim.records import RequestRecord, RunResult

# A span is a tuple (worker, kind, request_id, begin in seconds, end in seconds).
Span = tuple[str, str, str, float, float]


def spans(records: Iterable[RequestRecord]) -> list[Span]:
    """Returns the spans of the requests' prefills, transfers and decodes.

    Spans that have not ended are left out. Time in a queue has no span; it shows as the gap before one.
    """
    found: list[Span] = []
    for r in records:
        parts = [("prefill", r.prefill_worker, r.prefill_started_s, r.prefill_done_s)]
        # A colocated prefill ends with the first token, and the decode is on the same worker.
        if r.colocated:
            parts = [("prefill", r.prefill_worker, r.prefill_started_s, r.first_token_s)]
            parts.append(("decode", r.decode_worker, r.first_token_s, r.finished_s))
        else:
            parts.append(("transfer", r.decode_worker, r.transfer_started_s, r.transfer_done_s))
            parts.append(("decode", r.decode_worker, r.transfer_done_s, r.finished_s))
        for kind, worker, begin, end in parts:
            if worker is not None and begin is not None and end is not None:
                found.append((worker, kind, r.request_id, begin, end))
    return found


def trace_events(result: RunResult) -> list[dict[str, Any]]:
    """Returns the events of the trace, ordered by worker and time."""
    by_worker: dict[str, list[Span]] = {}
    for span in spans(result.requests):
        by_worker.setdefault(span[0], []).append(span)
    events: list[dict[str, Any]] = []
    for pid, worker in enumerate(sorted(by_worker), 1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": worker}})
        busy: list[tuple[float, int]] = []  # (end, lane)
        free: list[int] = []
        for _, kind, request_id, begin, end in sorted(by_worker[worker], key=lambda s: (s[3], s[4], s[2])):
            while busy and busy[0][0] <= begin:
                heapq.heappush(free, heapq.heappop(busy)[1])
            lane = heapq.heappop(free) if free else len(busy) + 1
            heapq.heappush(busy, (end, lane))
            events.append(
                {
                    "ph": "X",
                    "name": request_id,
                    "cat": kind,
                    "pid": pid,
                    "tid": lane,
                    "ts": round(begin * 1e6, 3),
                    "dur": round((end - begin) * 1e6, 3),
                    "args": {"kind": kind},
                }
            )
    return events


def write(result: RunResult, path: Path) -> None:
    """Writes the run as a trace file to `path`."""
    path.write_text(json.dumps({"traceEvents": trace_events(result), "displayTimeUnit": "ms"}))
