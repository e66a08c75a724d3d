"""The figures and aims of hostile clients, as the document shows them."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.experiments.base import Row

MORE_S = 0.1
"""Aim: by how much the longest gap of a well-behaved stream may grow, in seconds."""

NAMES = {
    "slow_readers": "slow readers",
    "half_open": "half-open senders",
    "idle": "idle connections",
    "large": "requests of 4 MB",
}
_MB = 1e6


def rows(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the figures of each run of a result."""
    for run in whole["runs"]:
        yield from rows_of(run)


def rows_of(run: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the figures of one run."""
    name = f"{run['setup']} limits, {run['count']:,} {NAMES[run['kind']]}"
    alone, hostile = run["alone"], run["hostile"]
    more_s = hostile["longest_gap_s"] - alone["longest_gap_s"]
    yield Row(f"{name}: longest gap alone", None, 1e3 * alone["longest_gap_s"], "ms")
    yield Row(f"{name}: longest gap with them", None, 1e3 * hostile["longest_gap_s"], "ms")
    yield Row(
        f"{name}: longest gap, more than alone",
        None,
        1e3 * more_s,
        "ms",
        aim=f"at most {1e3 * MORE_S:.0f} ms",
        met=more_s <= MORE_S,
    )
    yield Row(f"{name}: p99 of the gaps with them", None, 1e3 * hostile["p99_gap_s"], "ms")
    yield Row(
        f"{name}: longest wait for a first event with them", None, 1e3 * hostile["longest_first_s"], "ms"
    )
    yield Row(f"{name}: longest delay of the client itself", None, 1e3 * hostile["late_s"], "ms")
    failed = sum(run["failed"].values())
    yield Row(f"{name}: well-behaved requests that failed", None, failed, aim="none", met=failed == 0)
    yield Row(f"{name}: open at once", None, run["most_open"])
    for outcome, n in sorted(run["outcomes"].items()):
        yield Row(f"{name}: {outcome}", None, n)
    grown, budget = run["rss_peak_bytes"] - run["rss_before_bytes"], run["budget_bytes"]
    yield Row(
        f"{name}: growth of the ingress's RSS",
        None,
        grown / _MB,
        "MB",
        aim=f"at most {budget / _MB:,.0f} MB",
        met=grown <= budget,
    )
    after = run["rss_after_bytes"] - run["rss_before_bytes"]
    yield Row(f"{name}: growth of the RSS that stays", None, after / _MB, "MB")
    for what, share in (("alone", run["cpu_share_alone"]), ("with them", run["cpu_share_hostile"])):
        if share is not None:
            yield Row(f"{name}: cores of the ingress {what}", None, share)
    left = sum(run["left"].values())
    yield Row(f"{name}: requests, leases and connections left", None, left, aim="none", met=left == 0)
