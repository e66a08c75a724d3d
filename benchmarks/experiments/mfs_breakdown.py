"""Where MFS's gain comes from (MFS 6.3, Figure 13): DBRX on conversations at 0.7 requests/s for each GPU.

CCT is the mean time of a collective, none of which overlaps with computation. Earliness is the time from the first
token to the deadline, of requests that are in time, in units of their SLO: early completion gains nothing and contends.

128 prefill GPUs (4 instances) stand for the paper's 1,024. Aims, set before the runs: CCT 52 % below fair sharing,
earliness 42 % below fair sharing, SJF and EDF, attainment 2.2 times fair sharing's; MFS in time more often than each
rival. The paper's attainment does not name the baseline; fair sharing is the one of its testbed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.mfs_common import POLICIES, change, named, ratio, run_one

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "MFS's breakdown: collectives, earliness and attainment of five flow policies on DBRX"
SEEDS = (3, 1)
MODEL, WORK, RATE = "dbrx", "conversation", 0.7
CCT, EARLINESS, ATTAINMENT = -52.0, -42.0, 2.2  # Figure 13 and its text


def variants(quick: bool) -> list[Variant]:
    size = {"requests": 80, "warmup": 30, "groups": 4, "instances": 2}
    if not quick:
        size = {"requests": 1_024, "warmup": 256, "instances": 4}
    return [named(MODEL, WORK, policy, RATE, **size) for policy in POLICIES]


def _name(policy: str) -> str:
    return f"{MODEL} {WORK} {RATE:g}/s {policy}"


def compare(results: Results) -> list[Row]:
    rows = [change(results, "mean CCT, MFS vs fair", _name("fair"), _name("mfs"), "cct_mean_s", CCT)]
    for rival in ("sjf", "edf", "karuna"):
        rows.append(
            change(results, f"mean CCT, MFS vs {rival}", _name(rival), _name("mfs"), "cct_mean_s", None)
        )
    for rival in ("fair", "sjf", "edf"):
        what = f"earliness of requests in time, MFS vs {rival}"
        rows.append(change(results, what, _name(rival), _name("mfs"), "earliness_slo_mean", EARLINESS))
    metric = "ttft_slo_share"
    rows.append(ratio(results, "in time, MFS vs fair", _name("fair"), _name("mfs"), metric, ATTAINMENT))
    for rival in ("sjf", "edf", "karuna"):
        over, under = results.mean(_name("mfs"), metric), results.mean(_name(rival), metric)
        found = over / under if under else None
        reached = found is None or found >= 1.0
        rows.append(Row(f"in time, MFS vs {rival}", None, found, "x", None, "at least 1", reached))
    for policy in POLICIES:
        for what, key in (
            ("in time", metric),
            ("short in time", f"{metric}/short"),
            ("long in time", f"{metric}/long"),
        ):
            rows.append(Row(f"{what}, {policy}", None, 100 * results.mean(_name(policy), key), "%"))
        rows.append(Row(f"mean TTFT, {policy}", None, 1e3 * results.mean(_name(policy), "ttft_mean_s"), "ms"))
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    made, axes = look.figure()
    series = {}
    for metric, label in (
        ("cct_mean_s", "CCT"),
        ("earliness_slo_mean", "earliness"),
        ("ttft_slo_share", "in time"),
    ):
        fair = results.mean(_name("fair"), metric)
        if fair:
            ours = [results.mean(_name(policy), metric) / fair for policy in POLICIES]
            series[label] = look.Series(list(range(len(POLICIES))), ours)
    look.lines(axes[0], series, ", ".join(POLICIES), "of fair sharing's", f"{MODEL}, {WORK}")
    return {"mfs_breakdown": made}
