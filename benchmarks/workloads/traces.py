"""Reads published traces as workloads: each row becomes one request, in the file's order.

`predictors.traces` knows the formats and reports the errors of single rows. This module adds the rules of a simulation:

- Rows of equal time keep the file's order. Rows that go back in time are an error, unless `sort` is set.
- Times count from the first row (from the earliest one with `sort`).
- A row without a prompt token or an output token is an error, because no engine serves it. `drop_empty` leaves such
  rows out.
- Mooncake's `hash_ids` become `block_hashes`, without a last block that the prompt does not fill.
- `load_trace` loads a file only if it fits in memory; `stream_trace` reads a file of any length in constant memory.
"""

from __future__ import annotations

import lzma
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks.workloads.record import WorkloadError, WorkloadRequest
from predictors.traces import (
    MOONCAKE_BLOCK_TOKENS,
    TraceError,
    TraceRow,
    conversation,
    open_text,
    prompt_key,
    trace_format,
    trace_rows,
)

# Bytes of memory for one request and for one of its block hashes: measured with tracemalloc on the Mooncake
# conversation trace, rounded up.
REQUEST_BYTES = 640
BLOCK_BYTES = 40
_FREE_MEMORY_SHARE = 0.5
_SAMPLE_LINES = 2_000
# Compressed files are read ahead in chunks, so the number of bytes read says little before this many have been read.
_SAMPLE_BYTES = 64 * 1024


def stream_trace(path: Path, *, sort: bool = False, drop_empty: bool = False) -> Iterator[WorkloadRequest]:
    """Yields the requests of the trace at `path` one at a time. Raises TraceError with file and line.

    With `sort` all rows are read before the first is yielded; `load_trace` is the better call then.
    """
    if sort:
        yield from load_trace(path, sort=True, drop_empty=drop_empty)
        return
    kind = trace_format(path)
    first_s = last_s = None
    for row in trace_rows(path):
        if last_s is not None and row.at_s < last_s:
            raise TraceError(
                f"{path}:{row.line}: its time lies {last_s - row.at_s:g} s before the row above it; "
                "a trace must be in order of time: sort its lines (sort=True does)"
            )
        last_s = row.at_s
        if first_s is None:
            first_s = row.at_s
        request = _request(path, kind, row, first_s, drop_empty)
        if request is not None:
            yield request
    if first_s is None:
        raise TraceError(f"{path}: no requests in it")


def load_trace(
    path: Path, *, sort: bool = False, drop_empty: bool = False, memory_limit_bytes: int | None = None
) -> list[WorkloadRequest]:
    """Returns all requests of the trace at `path`.

    Raises TraceError with file and line, and WorkloadError where the requests would take more than
    `memory_limit_bytes` (default: half of the available memory).
    """
    limit = free_memory_bytes() if memory_limit_bytes is None else memory_limit_bytes
    expected = estimate_memory_bytes(path)
    if expected > limit:
        raise WorkloadError(_too_long(path, expected, limit))
    kind = trace_format(path)
    rows: Iterator[WorkloadRequest]
    if sort:
        rows = (
            r for row in trace_rows(path) if (r := _request(path, kind, row, 0.0, drop_empty)) is not None
        )
    else:
        rows = stream_trace(path, drop_empty=drop_empty)
    found = []
    used = 0
    for request in rows:
        used += REQUEST_BYTES + BLOCK_BYTES * len(request.block_hashes)
        # The estimate was too low.
        if used > limit:
            raise WorkloadError(_too_long(path, max(used, expected), limit))
        found.append(request)
    if not found:
        raise TraceError(f"{path}: no requests in it")
    if sort:
        # The sort is stable: equal times keep the file's order.
        found.sort(key=lambda r: r.at_s)
        first_s = found[0].at_s
        found = [replace(r, at_s=r.at_s - first_s) for r in found]
    return found


def free_memory_bytes() -> int:
    """Returns the bytes that a trace may take by default: half of the memory that is available now."""
    return int(psutil.virtual_memory().available * _FREE_MEMORY_SHARE)


def estimate_memory_bytes(path: Path) -> int:
    """Returns the bytes that the trace's requests will take in memory, estimated from its first lines and its size.

    Raises TraceError where the file cannot be read.
    """
    mooncake = trace_format(path) == "mooncake"
    # Opening the file raises the TraceError of a file that does not exist.
    open_text(path).close()
    lines = blocks = 0
    size_bytes = os.path.getsize(path)
    with path.open("rb") as raw:
        packed = path.suffix == ".xz"
        source = lzma.open(raw) if packed else raw  # noqa: SIM115 (closed with raw)
        try:
            for line in source:
                lines += 1
                blocks += line.count(b",") - 3 if mooncake else 0
                if lines >= _SAMPLE_LINES and _SAMPLE_BYTES <= raw.tell() < size_bytes:
                    break
            read_bytes = raw.tell()
        except (lzma.LZMAError, EOFError) as error:
            raise TraceError(f"{path}: damaged file: {error}") from error
    sampled = lines * REQUEST_BYTES + max(blocks, 0) * BLOCK_BYTES
    return int(sampled * size_bytes / max(read_bytes, 1))


def _too_long(path: Path, needed_bytes: int, limit_bytes: int) -> str:
    return (
        f"{path}: its requests need about {needed_bytes / 2**20:,.0f} MiB of memory, more than the "
        f"{limit_bytes / 2**20:,.0f} MiB allowed; read it with stream_trace and keep a window or the first "
        "requests, or raise memory_limit_bytes, or cut the file"
    )


def _request(
    path: Path, kind: str, row: TraceRow, first_s: float, drop_empty: bool
) -> WorkloadRequest | None:
    if row.prompt_tokens < 1 or row.output_tokens < 1:
        if drop_empty:
            return None
        raise TraceError(
            f"{path}:{row.line}: {row.prompt_tokens} prompt and {row.output_tokens} output tokens: no engine "
            "serves that (drop_empty=True, or --skip-unusable of `python -m benchmarks trace`, leaves such rows out)"
        )
    request_id = f"{path.name}:{row.line}"
    if kind != "mooncake":
        return WorkloadRequest(request_id, row.at_s - first_s, row.prompt_tokens, row.output_tokens)
    return WorkloadRequest(
        request_id=request_id,
        at_s=row.at_s - first_s,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        block_hashes=row.hash_ids[: row.prompt_tokens // MOONCAKE_BLOCK_TOKENS],
        block_tokens=MOONCAKE_BLOCK_TOKENS,
        session=conversation(row.hash_ids) or "",
        prompt_key=prompt_key(row.hash_ids, row.prompt_tokens),
    )
