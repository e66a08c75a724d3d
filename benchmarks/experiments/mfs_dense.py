"""MFS in simulation on a dense model with sequence parallelism (MFS 6.3, Figures 12 and 14): Llama3-8B, TP 4 and SP 4.

Prompts are those of Mooncake's traces: conversations, and agents, for which Mooncake's synthetic trace stands in. It
shares as much of its prompts; the paper's agent trace is not published. Arrivals of a tick of the trace's clock are
spread over it. There are 64 prefill GPUs in instances of 16, in 8 layer groups, and 512 measured requests a run.
Mooncake's synthetic trace has only 3,993 requests, so fewer precede a run on it (`HISTORY`), and the runs of different
seeds share many.

Rates lie around the knee, which was looked for on seed 0 (`mfs_common.SEEDS_FROM`): from where every policy has most
of its requests in time to where fair sharing fails. The paper's rate of Figure 14 is above; our cluster is overloaded
there under every policy, so its breakdown stands beside one at the rate at which attainment is compared.

Aims, set before the runs: the paper's upper ends, 1.6x and 1.9x of Karuna's attainment, 1.15x of its rate on agents.
Figure 14 (collectives, and earliness) has no printed figures; ours stand without aims.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.mfs_common import (
    MOONCAKE,
    OURS,
    POLICIES,
    RIVALS,
    SEEDS_FROM,
    change,
    earliness,
    named,
    run_one,
)
from benchmarks.experiments.mfs_rates import (
    Attainments,
    attainments,
    compared_at,
    of_seeds,
    over_rivals,
    sustained,
)
from benchmarks.workloads.catalog import available, or_excerpt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SEEDS_FROM", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "MFS on Llama3-8B with sequence parallelism: attainment by rate, collectives, earliness; Mooncake's prompts"
SEEDS = (3, 1)
MODEL = "llama3-8b"
RATES: Mapping[str, tuple[float, ...]] = {"conversation": (0.2, 0.25, 0.3), "agent": (0.15, 0.2, 0.25)}
FIG_14 = ("conversation", 0.5)
HISTORY = {"conversation": 3_000, "agent": 1_500}
# workload -> (attainment over Karuna's, rate over Karuna's), Figure 12 and its text
PAPER: Mapping[str, tuple[float, float | None]] = {"conversation": (1.6, None), "agent": (1.9, 1.15)}


def variants(quick: bool) -> list[Variant]:
    size: dict[str, Any] = {"instances": 4, "requests": 512, "warmup": 200}
    if quick:
        size = {"instances": 2, "requests": 40, "warmup": 10, "groups": 4}
    policies = POLICIES if not quick else ("fair", "karuna", "mfs")
    return [
        named(MODEL, f"mooncake-{work}", policy, rate, trace=trace, history=HISTORY[work], **size)
        for work, trace in _traces(quick).items()
        for rate in _rates(work, quick)
        for policy in policies
    ]


def _rates(work: str, quick: bool) -> list[float]:
    if quick:
        return list(RATES[work][1:])
    return [*RATES[work], *(rate for of, rate in (FIG_14,) if of == work)]


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
        where = MODEL, f"mooncake-{work}", 4 if results.quick else 8
        found, seeds = attainments(results, *where), of_seeds(results, *where)
        rows += over_rivals(work, found, share, against="karuna", seeds=seeds)
        rows += sustained(work, found, rate, seeds)
        for at in sorted({compared_at(found), *(rate for of, rate in (FIG_14,) if of == work)}):
            rows += _breakdown(results, work, found, at)
    return rows


def _breakdown(results: Results, work: str, found: Attainments, rate: float) -> list[Row]:
    """Returns Figure 14's rows at a rate: each form's collectives and earliness against each rival's; none where the
    rate did not run.
    """
    rows = []
    for form, title in OURS.items():
        for rival in RIVALS:
            if rate not in found.get(form, {}) or rate not in found.get(rival, {}):
                continue
            theirs, ours = (f"{MODEL} mooncake-{work} {rate:g}/s {policy}" for policy in (rival, form))
            what = f"{work}: at {rate:g}/s, {title} vs {rival}"
            rows += [
                change(results, f"{what}: mean CCT", theirs, ours, "cct_mean_s", None),
                earliness(results, f"{what}: earliness of requests in time", theirs, ours, None),
            ]
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
