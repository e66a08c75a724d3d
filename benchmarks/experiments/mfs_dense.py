"""MFS in simulation on a dense model with sequence parallelism (MFS 6.3, Figures 12 and 14): Llama3-8B, TP 4 and SP 4.

Prompts are those of Mooncake's traces: conversations, and agents, for which Mooncake's synthetic trace stands in. It
shares as much of its prompts; the paper's agent trace is not published. Arrivals of a tick of the trace's clock are
spread over it. There are 64 prefill GPUs in instances of 16, in 8 layer groups.

Aims, set before the runs: the paper's upper ends, 1.6x and 1.9x of Karuna's attainment, 1.15x of its rate on agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.mfs_common import MOONCAKE, POLICIES, SEEDS_FROM, named, run_one
from benchmarks.experiments.mfs_rates import attainments, over_rivals, sustained
from benchmarks.workloads.catalog import available, or_excerpt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SEEDS_FROM", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "MFS on Llama3-8B with sequence parallelism: attainment by rate on Mooncake's prompts"
SEEDS = (3, 1)
MODEL = "llama3-8b"
RATES = (0.2, 0.35, 0.5, 0.65)
# workload -> (attainment over Karuna's, rate over Karuna's), Figure 12 and its text
PAPER: Mapping[str, tuple[float, float | None]] = {"conversation": (1.6, None), "agent": (1.9, 1.15)}


def variants(quick: bool) -> list[Variant]:
    size: dict[str, Any] = {"instances": 4, "requests": 1_024, "warmup": 256}
    if quick:
        size = {"instances": 2, "requests": 40, "warmup": 10, "groups": 4}
    policies = POLICIES if not quick else ("fair", "karuna", "mfs")
    return [
        named(MODEL, f"mooncake-{work}", policy, rate, trace=trace, **size)
        for work, trace in _traces(quick).items()
        for rate in (RATES[1:3] if quick else RATES)
        for policy in policies
    ]


def _traces(quick: bool) -> dict[str, str]:
    """Returns the trace of each workload that this machine has; conversations are shipped in part."""
    found = {"conversation": or_excerpt(MOONCAKE["mooncake-conversation"])}
    if not quick and available(MOONCAKE["mooncake-agent"]):
        found["agent"] = MOONCAKE["mooncake-agent"]
    return found


def compare(results: Results) -> list[Row]:
    rows = []
    for work, (share, rate) in PAPER.items():
        if not results.where(workload=f"mooncake-{work}"):
            continue
        found = attainments(results, MODEL, f"mooncake-{work}", 4 if results.quick else 8)
        rows += over_rivals(work, found, share, against="karuna")
        rows.append(sustained(work, found, rate))
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    works = [work for work in PAPER if results.where(workload=f"mooncake-{work}")]
    made, axes = look.figure(columns=len(works))
    for axis, work in zip(axes, works, strict=True):
        found = attainments(results, MODEL, f"mooncake-{work}", 4 if results.quick else 8)
        series = {
            policy: look.Series(list(by_rate), [100 * share for share in by_rate.values()])
            for policy, by_rate in found.items()
        }
        look.lines(axis, series, "requests/s for each GPU", "in time, %", work)
    return {"mfs_dense": made}
