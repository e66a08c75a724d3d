"""NetKV experiment 1 (VI-C, Table II): mean TTFT over load, and the tiers of Table VI.

Where we differ by more than 3 points, and why:

- RAG, NetKV-Full vs CLA* at 200 and 250 % (we gain 10 and 9 %, the paper 14 and 13): the count of own transfers sends
  22 and 25 % of them to the far tier to avoid others that they would not meet in this fabric. Without it, or with it
  divided by the uplinks, the gain is 16 and 14 % (`netkv_ladder`). That CLA*'s hits grow with load here (17, 23, 23 %
  of prompt tokens) does not explain it: NetKV's grow as much, and with those of 100 % for both it would gain 10.9 %.
- RAG vs RR at 250 % (-22.9 %, the paper -19.4): within our interval of 4.6.
- Chatbot vs CLA* (the peak -13.8 %, at 75 %; the paper's -6.8): not explained; `netkv_ladder` has the arithmetic. At
  200 % the mean of 20 windows is -9.9 %, and vs RR -12.3 (-12.6).
- Long context vs RR (the peak -12.2 %, the paper -23.9 at 75 %): not explained; what would have to be so: by the
  paper's peaks RR has 8,112 ms at 75 %, NetKV 6,175 and CLA* at most 7,025 (at no load is NetKV more than 12.1 % below
  it), so CLA* is at least 13.4 % below RR. With 177 ms + 76 us a token of prefill and at least 52.4 us of transfer (in
  the pod, alone) NetKV's prompts have at most 46.7K tokens; RR's transfers then take 94 us a token, as in Table II, and
  CLA*'s 71, a quarter less over the same tiers, of which hits at p_share 0.1 save at most a tenth. In ours CLA* is
  level with RR (98 and 102 us at 75 %, 111 and 109 at 100 %). The window alone is unlikely: one window's gain over RR
  has a deviation of 3.5 points; none of the 40 of `netkv_windows` has the paper's figures, 2 of 60 others that we tried
  have (-23 to -26 % vs RR, CLA* 12 to 13 % below RR). Nor is it bursts (ticks left as they are: CLA*
  2 % below RR), nor one NIC an instance (the same), nor a quarter of the KV memory (CLA* 1 to 6 % above RR).
- "rag-conversation" at 200 %: prompts of 15.4K tokens instead of 9.7K fill the links earlier, round robin's first: from
  100 to 200 % what it moves takes 114 and 169 us a token, CLA*'s 103 and 140 (RAG 101 and 127, 103 and 119).
- SLO attainment is 3 to 5 points higher: the thinned tail is lighter than the paper's.
- NetKV sends 81 % within the pod, the paper 69 %: prefill workers take turns, so one's own transfers overlap less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.netkv_common import milliseconds, named, reduction, run_one, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV experiment 1: mean TTFT of five schedulers from 50 to 250 % load, on Mooncake conversation"
LOADS = {"rag": (0.5, 1.0, 1.5, 2.0, 2.5), "chatbot": (0.75, 1.0, 2.0), "long": (0.75, 1.0, 2.0)}
SHOWN = ("RR", "LA", "CA", "CLA*", "NetKV-Full")
# Table II: load -> scheduler -> (TTFT ms, TBT ms, SLO share, transfer ms)
TABLE_2 = {
    1.0: {
        "RR": (1969, 12.74, 0.907, 993),
        "CLA*": (1812, 12.71, 0.923, 835),
        "NetKV-Full": (1598, 12.94, 0.944, 620),
    },
    2.0: {
        "RR": (2171, 13.01, 0.887, 1194),
        "CLA*": (1995, 12.88, 0.906, 1018),
        "NetKV-Full": (1710, 13.29, 0.933, 733),
    },
    2.5: {
        "RR": (2224, 13.13, 0.882, 1246),
        "CLA*": (2068, 12.97, 0.899, 1091),
        "NetKV-Full": (1793, 13.42, 0.925, 816),
    },
}
PEAKS = {
    "chatbot": (-12.6, -6.8),
    "rag": (-21.2, -14.3),
    "long": (-23.9, -12.1),
}  # vs RR, vs CLA*, over the loads


def variants(quick: bool) -> list[Variant]:
    made = [
        named(workload, scheduler, f"{load:.0%}", load=load)
        for workload in (("rag",) if quick else LOADS)
        for load in ((1.0, 2.0) if quick else LOADS[workload])
        for scheduler in (SHOWN if workload == "rag" and not quick else ("RR", "CLA*", "NetKV-Full"))
    ]
    return made + [
        named("rag-conversation", scheduler, f"{load:.0%}", load=load)
        for load in (1.0, 2.0)
        for scheduler in ("RR", "CLA*", "NetKV-Full")
    ]


def compare(results: Results) -> list[Row]:
    rows = []
    for load, by_scheduler in TABLE_2.items():
        at = f"rag {load:.0%}"
        if f"{at} RR" not in results.runs:
            continue
        ours = f"{at} NetKV-Full"
        for base in ("RR", "CLA*"):
            paper = 100.0 * (by_scheduler["NetKV-Full"][0] / by_scheduler[base][0] - 1.0)
            rows.append(
                reduction(results, f"{at}, NetKV-Full vs {base}", f"{at} {base}", ours, round(paper, 1))
            )
        for scheduler, (ttft_ms, tbt_ms, slo, transfer_ms) in by_scheduler.items():
            name = f"{at} {scheduler}"
            rows += [
                milliseconds(results, f"{name}: TTFT", name, "ttft_mean_s", ttft_ms),
                milliseconds(results, f"{name}: transfer", name, "transfer_mean_s", transfer_ms),
                milliseconds(results, f"{name}: TBT", name, "tbt_mean_s", tbt_ms),
                share(results, f"{name}: SLO", name, "ttft_slo_share", 100 * slo),
            ]
    rows += [
        share(results, "rag 100% CLA*: transfers in the pod", "rag 100% CLA*", "tier_share/2", 32.0),
        share(
            results, "rag 100% NetKV-Full: transfers in the pod", "rag 100% NetKV-Full", "tier_share/2", 68.9
        ),
    ]
    for load in (1.0, 2.0):
        at = f"rag-conversation {load:.0%}"
        for base, paper in (
            ("RR", -18.9 if load == 1.0 else -21.2),
            ("CLA*", -11.8 if load == 1.0 else -14.3),
        ):
            what = f"{at}, NetKV-Full vs {base}"
            rows.append(reduction(results, what, f"{at} {base}", f"{at} NetKV-Full", paper))
    if not results.quick:
        rows += [row for workload in PEAKS for row in _peaks(results, workload)]
    return rows


def _peaks(results: Results, workload: str) -> list[Row]:
    """The largest reduction over the loads."""
    made = []
    for base, paper in zip(("RR", "CLA*"), PEAKS[workload], strict=True):
        found = [
            reduction(
                results,
                f"{workload} {load:.0%}, NetKV-Full vs {base}, the peak",
                *_pair(workload, load, base),
                paper,
            )
            for load in LOADS[workload]
        ]
        made.append(min(found, key=lambda row: row.ours or 0.0))
    return made


def _pair(workload: str, load: float, base: str) -> tuple[str, str]:
    return f"{workload} {load:.0%} {base}", f"{workload} {load:.0%} NetKV-Full"


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    workloads = [w for w in LOADS if f"{w} 100% RR" in results.runs]
    made, axes = look.figure(columns=len(workloads))
    for at, workload in zip(axes, workloads, strict=True):
        found = {c["scheduler"]: c for c in results.variants.values() if c["workload"] == workload}
        series = {}
        for scheduler in found:
            names = results.where(workload=workload, scheduler=scheduler)
            series[scheduler] = look.Series(
                [100 * results.variants[name]["load"] for name in names],
                [results.mean(name, "ttft_mean_s") for name in names],
            )  # no intervals: they are those of the windows, which all schedulers share
            if workload == "rag" and scheduler in TABLE_2[1.0]:
                paper = [TABLE_2[load][scheduler][0] / 1e3 for load in TABLE_2]
                series[f"{scheduler}, paper"] = look.Series(
                    [100 * load for load in TABLE_2], paper, quiet=True
                )
        look.lines(at, series, "load, % of capacity", "mean TTFT, s", workload)
    return {"netkv_load": made}
