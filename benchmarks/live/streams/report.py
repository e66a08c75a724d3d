"""The figures and aims of many streams, as the document shows them."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.experiments.base import Row

HOT = ("ingress", "router")
WITHIN_MS = 10.0
"""Aim for the p99 of the gaps beyond the step at the small step."""
PER_STREAM_KB = 60.0
"""Aim: memory of a stream in the ingress, in kB of 1,000 bytes."""
CPU_MS_PER_TOKEN = 0.02
"""Aim: CPU time of ingress and router for each token of a stream."""


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the figures of a result."""
    yield from rows_of(whole["many"])
    yield from _most(whole["search"])


def rows_of(one: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the figures of one measurement of many streams."""
    name = f"{one['streams']:,} streams of {1e3 * one['step_s']:g} ms, {one['slow']} read slowly"
    kb = one["rss_per_stream_bytes"] / 1e3
    yield Row(
        f"{name}: memory of a stream in the ingress",
        None,
        kb,
        "kB",
        aim=f"at most {PER_STREAM_KB:g} kB",
        met=kb <= PER_STREAM_KB,
    )
    cpu = one["cpu_us_per_token"]
    for role, us in cpu.items():
        if role in HOT or us >= 0.1:
            yield Row(f"{name}: CPU of {role} a token", None, us, "us")
    both_us = sum(cpu.get(role, 0.0) for role in HOT)
    yield Row(
        f"{name}: CPU of ingress and router a token",
        None,
        both_us,
        "us",
        aim=f"at most {1e3 * CPU_MS_PER_TOKEN:g} us",
        met=bool(cpu) and both_us <= 1e3 * CPU_MS_PER_TOKEN,
    )
    yield Row(f"{name}: tokens", None, one["tokens_per_s"], "/s")
    for quantile, ms in one["beyond_ms"].items():
        if ms is not None:
            yield Row(f"{name}: gap beyond the step, {quantile}", None, ms, "ms")
    if one["late_p99_ms"] is not None:
        yield Row(f"{name}: delay of the clients' own timer, p99", None, one["late_p99_ms"], "ms")
    failed = sum(one["failed"].values()) + one["streams"] - one["slow"] - one["open"]
    yield Row(f"{name}: streams that failed", None, failed, aim="none", met=failed == 0)


def _most(search: Mapping[str, Any]) -> Iterator[Row]:
    name = f"streams of {1e3 * search['step_s']:g} ms whose p99 gap is within {WITHIN_MS:g} ms of the step"
    note = "" if search["ended"] else "the time was up before the search ended"
    if search["most"] is not None:
        yield Row(f"most {name}", None, search["most"], note=note)
    if search["too_many"] is not None:
        yield Row(f"too many {name}", None, search["too_many"], note=note)
    best = [one for one in search["tried"] if one["streams"] == search["most"]]
    for one in best[-1:]:
        yield Row(f"most {name}: gap beyond the step, p99", None, one["beyond_ms"]["p99"], "ms")
        for role in HOT:
            if role in one["cpu_us_per_token"]:
                yield Row(f"most {name}: CPU of {role} a token", None, one["cpu_us_per_token"][role], "us")
