"""Where MFS's gain comes from (MFS 6.3, Figure 13): DBRX on conversations at 0.7 requests/s for each GPU.

CCT is the mean time of a collective, none of which overlaps with computation. Earliness is the time from the first
token to the deadline, of requests that are in time, in units of their SLO: early completion gains nothing and contends.

128 prefill GPUs (4 instances) stand for the paper's 1,024. The paper's rate overloads them under fair sharing, so the
same is shown at 0.4 requests/s, without aims. Aims, set before the runs: CCT 52 % below fair sharing,
earliness 42 % below fair sharing, SJF and EDF, attainment 2.2 times fair sharing's; MFS in time more often than each
rival. The paper's attainment does not name the baseline; fair sharing is the one of its testbed.

A policy that has 2.2 times the attainment of another leaves that one below 45 %, and at the paper's rate hardly a
rival's request is in time here, so there is no earliness. After the first reports, which had two seeds, 0.5 requests/s
was therefore added with the same aims, and six seeds. It is a rate of `mfs_moe` for this model, not one that was
looked for. Karuna paces a transfer to end when it is due, so its earliness is nearly 0 and no base of a percentage; nor
is that of a policy with fewer than `ENOUGH` of its requests in time (`mfs_common.earliness`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.mfs_common import (
    EARLY,
    OURS,
    RIVALS,
    SEEDS_FROM,
    change,
    earliness,
    named,
    ratio,
    run_one,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SEEDS_FROM", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "MFS's breakdown: collectives, earliness and attainment of flow policies on DBRX"
SEEDS = (6, 1)
MODEL, WORK = "dbrx", "conversation"
PAPER_RATE, MIDDLE, LOWER = 0.7, 0.5, 0.4
RATES = (PAPER_RATE, MIDDLE, LOWER)
CCT, EARLINESS, ATTAINMENT = -52.0, -42.0, 2.2  # Figure 13 and its text


def variants(quick: bool) -> list[Variant]:
    size: dict[str, Any] = {"requests": 80, "warmup": 30, "groups": 4, "instances": 2}
    if not quick:
        size = {"requests": 512, "warmup": 128, "instances": 4}
    return [
        named(MODEL, WORK, policy, rate, **size)
        for rate in ((PAPER_RATE,) if quick else RATES)
        for policy in (*RIVALS, *OURS)
    ]


def _name(policy: str, rate: float) -> str:
    return f"{MODEL} {WORK} {rate:g}/s {policy}"


def compare(results: Results) -> list[Row]:
    return [row for rate in RATES if _name("mfs", rate) in results.runs for row in _of_rate(results, rate)]


def _of_rate(results: Results, rate: float) -> list[Row]:
    """Returns the rows of one rate; the lowest rate has none of the paper's figures and aims."""
    rows = []
    at_paper = rate != LOWER
    for ours, form in OURS.items():
        for rival in RIVALS:
            names, what = (_name(rival, rate), _name(ours, rate)), f"at {rate:g}/s, {form} vs {rival}"
            cct = CCT if at_paper and rival == "fair" else None
            early = EARLINESS if at_paper and rival != "karuna" else None
            share = ATTAINMENT if at_paper and rival == "fair" else None
            rows += [
                change(results, f"{what}: mean CCT", *names, "cct_mean_s", cct),
                earliness(results, f"{what}: earliness of requests in time", *names, early),
                ratio(results, f"{what}: in time", *names, "ttft_slo_share", share),
            ]
    for policy in (*RIVALS, *OURS):
        name = _name(policy, rate)
        for what, key in (("in time", ""), ("short in time", "/short"), ("long in time", "/long")):
            ours_percent = 100 * results.mean(name, f"ttft_slo_share{key}")
            rows.append(Row(f"at {rate:g}/s, {policy}: {what}", None, ours_percent, "%"))
        mean_ms = 1e3 * results.mean(name, "ttft_mean_s")
        rows.append(Row(f"at {rate:g}/s, {policy}: mean TTFT", None, mean_ms, "ms"))
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    made, axes = look.figure()
    policies, series = (*RIVALS, *OURS), {}
    for metric, label in (("cct_mean_s", "CCT"), (EARLY, "earliness")):
        # the highest rate at which every policy has requests in time
        rates = [rate for rate in RATES if _name("fair", rate) in results.runs]
        rates = [r for r in rates if all(results.measured(_name(p, r), metric) for p in policies)]
        if rates:
            fair = results.mean(_name("fair", rates[0]), metric)
            ours = [results.mean(_name(policy, rates[0]), metric) / fair for policy in policies]
            series[f"{label} at {rates[0]:g}/s"] = look.Series(list(range(len(policies))), ours)
    look.lines(axes[0], series, ", ".join(policies), "of fair sharing's", f"{MODEL}, {WORK}")
    return {"mfs_breakdown": made}
