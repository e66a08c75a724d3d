"""MFS in simulation on mixture-of-experts models (MFS 6.3, Figures 10 and 11): attainment by rate, flow policies.

256 prefill GPUs in instances of 32 and as many decode ports (the paper's 1:1; 2,048 GPUs there), in 8 layer groups. One
point has 16 groups, which shows what coarser groups cost. Workloads are the stand-ins of `mfs_common`.

The sizes are meant to fit some three hours of one core (198 variants): 512 measured requests a run, five seeds, and
three or four rates around the knee. At first there were two seeds, with which most aims stayed open; three more were
added, their number fixed before any of them ran, and all five are of one state of the code. The knee was looked for on
seed 0 (`mfs_common.SEEDS_FROM`) with 384 requests, on DBRX only: on conversations up to 0.6 requests/s for each GPU, on
agents up to 1.0, where fair sharing still had most in time. ASSUMPTION: the other models' knees are not far from DBRX's
rates, and Grok-2's from a third of them.

After the first reports, in which all forms had more than `SUSTAINED` in time at every rate on conversations, 0.6/s was
added there. It adds a rate between which to read; the aims stayed.

Rows, for each model and workload, at the highest rate at which fair sharing still has `LEAST` of its requests in time:
the attainment of each form of MFS over the best rival's, and over Karuna's; and the rate that the form sustains over
theirs at an attainment of `SUSTAINED`, between the rates that ran. Aims, set before the runs: the paper's upper ends,
for attainment over the best rival's, because the paper names none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.mfs_common import POLICIES, SEEDS_FROM, named, run_one
from benchmarks.experiments.mfs_rates import attainments, of_seeds, over_rivals, sustained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SEEDS_FROM", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "MFS on mixture-of-experts models: attainment by rate under flow policies, 256 prefill GPUs"
SEEDS = (5, 1)
MODELS = ("mixtral-8x22b", "dbrx", "qwen3-coder", "grok-2")
WORKLOADS = ("conversation", "agent")
RATES: Mapping[str, tuple[float, ...]] = {
    "conversation": (0.25, 0.4, 0.5, 0.6),
    "agent": (0.8, 1.2, 1.6),
}
# The rate of DBRX on conversations at which 16 groups of layers stand beside 8.
FINER = 0.5
# Grok-2 has three times the active parameters of the others, so its rates are a third.
SCALE = {"grok-2": 1 / 3}
# (model, workload) -> (attainment over the baselines, rate over Karuna's): Figures 10 and 11 and their text
PAPER = {
    ("mixtral-8x22b", "conversation"): (1.8, 1.46),
    ("dbrx", "conversation"): (2.4, 1.46),
    ("qwen3-coder", "conversation"): (1.8, 1.46),
    ("grok-2", "conversation"): (1.8, 1.46),
    ("mixtral-8x22b", "agent"): (1.7, 1.3),
    ("dbrx", "agent"): (2.0, 1.4),
    ("qwen3-coder", "agent"): (2.0, 1.3),
    ("grok-2", "agent"): (1.7, 1.2),
}


def variants(quick: bool) -> list[Variant]:
    size: dict[str, Any] = {"instances": 8, "requests": 512, "warmup": 256}
    if quick:
        size = {"instances": 1, "requests": 60, "warmup": 20, "groups": 4}
    models, works = (MODELS, WORKLOADS) if not quick else (("mixtral-8x22b",), ("agent",))
    policies = POLICIES if not quick else ("fair", "karuna", "mfs")
    made = [
        named(model, work, policy, rate, **size)
        for model in models
        for work in works
        for rate in _rates(model, work, quick)
        for policy in policies
    ]
    if not quick:
        made += [
            named("dbrx", "conversation", policy, FINER, "16 groups", groups=16, **size)
            for policy in ("fair", "mfs")
        ]
    return made


def _rates(model: str, work: str, quick: bool) -> list[float]:
    rates = [round(rate * SCALE.get(model, 1.0), 4) for rate in RATES[work]]
    return rates[1:3] if quick else rates


def compare(results: Results) -> list[Row]:
    rows = []
    for (model, work), (share, rate) in PAPER.items():
        if not results.where(model=model, workload=work):
            continue
        where = model, work, 4 if results.quick else 8
        found, seeds = attainments(results, *where), of_seeds(results, *where)
        rows += over_rivals(f"{model}, {work}", found, share, seeds=seeds)
        rows += sustained(f"{model}, {work}", found, rate, seeds)
    if f"dbrx conversation 16 groups {FINER:g}/s mfs" in results.runs:
        for groups in ("", " 16 groups"):
            over = results.mean(f"dbrx conversation{groups} {FINER:g}/s mfs", "ttft_slo_share")
            under = results.mean(f"dbrx conversation{groups} {FINER:g}/s fair", "ttft_slo_share")
            what = f"dbrx, conversation,{groups or ' 8 groups'}: in time, MFS vs fair"
            rows.append(Row(what, None, over / under if under else None, "x"))
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    cells = [cell for cell in PAPER if results.where(model=cell[0], workload=cell[1])]
    made, axes = look.figure(columns=min(4, len(cells)), rows=-(-len(cells) // 4))
    for axis, (model, work) in zip(axes, cells, strict=False):
        found = attainments(results, model, work, 4 if results.quick else 8)
        series = {
            policy: look.Series(list(by_rate), [100 * share for share in by_rate.values()])
            for policy, by_rate in found.items()
        }
        look.lines(axis, series, "requests/s for each GPU", "in time, %", f"{model}, {work}")
    return {"mfs_moe": made}
