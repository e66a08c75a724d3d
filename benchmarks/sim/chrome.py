"""A run as a Chrome trace (chrome://tracing, Perfetto): prefill, transfer and decode spans on a lane per worker.

Format: JSON object with `traceEvents`; complete events (ph "X") with ts and dur in microseconds of virtual time. A
process is a worker, a thread one of its lanes: spans that overlap get lanes of their own.
"""

import heapq
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.sim.records import RequestRecord, RunResult

# Worker, kind, request_id, begin and end in seconds.
Span = tuple[str, str, str, float, float]


def spans(records: Iterable[RequestRecord]) -> list[Span]:
    """Spans of work by place and time, without those that have not ended. Queueing shows as the gap before a span."""
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
    """The events of the trace, in a fixed order."""
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
    """Writes the trace file."""
    path.write_text(json.dumps({"traceEvents": trace_events(result), "displayTimeUnit": "ms"}))
