"""MFS on its testbed (MFS 2.2, 6.2; Figures 5 and 9): Mixtral 8x7B on two prefill instances of eight 3090s.

Figure 5 compares collectives that contend with KV traffic and collectives that do not; here these have ports of their
own. Figure 9 compares MFS with the stack as it is, which shares links fairly. The other policies are not in the paper's
testbed figures; they are beside them as the fairest rivals. A run has 400 measured requests; the paper's has 1,024.

The busy share `mfs_common.BUSY` was chosen for Figure 5 by looking at seeds 0 and 1, whose Figure 9 was seen too. The
seeds of the report are others, from `mfs_common.SEEDS_FROM` on.
Collectives without contention bound what a policy can save of CCT; where that is less than the paper's saving, the
KV traffic here is a smaller part of what the ports carry than on the paper's testbed.

Aims, set before the runs: TTFT at least 20.7 % (conversations) and 32.3 % (agents) below fair sharing, CCT 31.9 % and
43.1 %; contention as in Figure 5 within a quarter of its effect; MFS not above any rival in mean TTFT.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Results, Row, Variant, aimed
from benchmarks.experiments.mfs_common import OURS, POLICIES, SEEDS_FROM, change, named, run_one

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SEEDS_FROM", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "MFS's testbed: what contention costs, and what flow policies give back, on Mixtral 8x7B"
SEEDS = (3, 1)
MODEL, RATE = "mixtral-8x7b", 1.0
WORKLOADS = ("conversation", "agent")
# workload -> changes in per cent of (mean TTFT, mean CCT) by MFS (6.2)
PAPER = {"conversation": (-20.7, -31.9), "agent": (-32.3, -43.1)}
# Figure 5: by how many per cent contention prolongs TTFT and CCT of agents
CONTENTION = (50.0, 80.0)
WITHIN = 0.25


def variants(quick: bool) -> list[Variant]:
    size = {"requests": 60, "warmup": 20, "groups": 4} if quick else {"requests": 400, "warmup": 100}
    policies = ("fair", "karuna", *OURS) if quick else POLICIES
    return [
        made
        for work in WORKLOADS
        for made in (
            named(MODEL, work, "fair", RATE, "isolated", isolated=True, **size),
            *(named(MODEL, work, policy, RATE, **size) for policy in policies),
        )
    ]


def compare(results: Results) -> list[Row]:
    rows = []
    for work in WORKLOADS:
        at = f"{MODEL} {work}"
        fair, ours = f"{at} {RATE:g}/s fair", f"{at} {RATE:g}/s mfs"
        alone = f"{at} isolated {RATE:g}/s fair"
        for what, metric, paper in zip(
            ("mean TTFT", "mean CCT"), ("ttft_mean_s", "cct_mean_s"), CONTENTION, strict=True
        ):
            rows.append(
                _contention(results, f"{work}: {what} by contention", alone, fair, metric, work, paper)
            )
        for what, metric, paper in zip(
            ("mean TTFT", "mean CCT"), ("ttft_mean_s", "cct_mean_s"), PAPER[work], strict=True
        ):
            for form, title in OURS.items():
                name = f"{at} {RATE:g}/s {form}"
                rows.append(change(results, f"{work}: {what}, {title} vs fair", fair, name, metric, paper))
        for what, metric in (("mean TTFT", "ttft_mean_s"), ("mean CCT", "cct_mean_s")):
            # What is left to save: collectives that nothing delays.
            rows.append(change(results, f"{work}: {what}, no contention vs fair", fair, alone, metric, None))
        for rival in _policies(results):
            if rival == "fair" or rival in OURS:
                continue
            name = f"{at} {RATE:g}/s {rival}"
            what = f"{work}: mean TTFT, MFS vs {rival}"
            rows.append(change(results, what, name, ours, "ttft_mean_s", None, at_least=0.0))
        for policy in _policies(results):
            name = f"{at} {RATE:g}/s {policy}"
            spread = results.spread(name, "ttft_slo_share")
            half = None if spread.half_width is None else 100 * spread.half_width
            rows.append(Row(f"{work}: in time, {policy}", None, 100 * spread.mean, "%", half))
    return rows


def _contention(
    results: Results, what: str, alone: str, fair: str, metric: str, work: str, paper: float
) -> Row:
    """Returns a row with the growth of a mean by contention; only Figure 5's workload has a figure and an aim."""
    shorter, half = results.reduction_percent(alone, fair, metric)
    ours = -shorter
    if work != "agent":
        return Row(what, None, ours, "%", half)
    least, most = paper * (1 - WITHIN), paper * (1 + WITHIN)
    return aimed(Row(what, paper, ours, "%", half), f"{least:g} to {most:g} %", least=least, most=most)


def _policies(results: Results) -> list[str]:
    return [p for p in POLICIES if f"{MODEL} agent {RATE:g}/s {p}" in results.runs]


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    made, axes = look.figure(columns=len(WORKLOADS))
    policies = _policies(results)
    for axis, work in zip(axes, WORKLOADS, strict=True):
        series = {}
        for metric, label in (("ttft_mean_s", "TTFT"), ("cct_mean_s", "CCT")):
            fair = results.mean(f"{MODEL} {work} {RATE:g}/s fair", metric)
            ours = [results.mean(f"{MODEL} {work} {RATE:g}/s {p}", metric) / fair for p in policies]
            series[label] = look.Series(list(range(len(policies))), ours)
        look.lines(axis, series, ", ".join(policies), "of fair sharing's", work)
    return {"mfs_testbed": made}
