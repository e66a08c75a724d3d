"""BalanceRoute Table 3: AUC and conditional MAE of survival and of exact match, with LightGBM beside them.

Nothing is simulated. Each predictor is fitted on requests of the past (`balance_route_cluster.history`) and then asked
about later ones, which come at the same rate, at ages 0, 16, 32 and so on, as a router asks at each refresh. A seed
draws the later requests; the past is the same for all, so intervals say nothing of how fits differ.

    AUC   stage 1: how well p tells requests that end within H tokens from the others
    MAE   stage 2: the mean error of the tokens to come, over requests that do end within H

The sources, of which the aims are for the paper's two (C.2.1):

    survival            the lengths of the past, and nothing else
    exact match         the lengths of the same prompt, or survival where it is not known. It also learns from later
                        requests that have ended, as in a router; the paper's is fitted once
    survival, ours      with eight requests of a prior, as deployed
    exact match, ours   as deployed: a prompt that is known from few requests counts less, and its template counts
    lightgbm            the learnt pair, which the paper has no figure of

The proprietary trace is not published. `recurring-long` stands in for it, whose share of recurring prompts was chosen
in view of this very table (`workloads/standins.py`): that exact match knows the length of most prompts is by
construction, and what survival says of outputs with a heavy tail is not. For Azure's trace of 2024 requests are sampled
from its published plots, with long outputs only. The plots have no prompts, so exact match is survival there: its row
stands beside the paper's figure without an aim.

The text of the paper has lost H. Its own figures say which of the values that it sweeps it was: what is left of a long
output that ends within H is nearly uniform on 1 to H, and an estimate that knows no more has a mean error of H / 4:
12 tokens at H = 48 and 24 at H = 96. In the paper survival has 20.1. So the aims are for H = 96, and 48 stands beside.
They were for 48 until a reduced run (seed 900) showed what this arithmetic says; the seeds that are measured begin
behind it. The bound of the outputs, which the text has lost as well, decides the figures of Azure 2024: the paper calls
them cap-bounded, and nearly all of its requests end within H.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.sim import profiles
from benchmarks.workloads import transform
from benchmarks.workloads.catalog import available, outcomes_of
from benchmarks.workloads.record import WorkloadRequest
from predictors.evaluate import HeldOut, evaluate
from predictors.features import replay
from predictors.memorise import EXACT_MATCH, PROMPT, Memorised
from predictors.protocol import Outcome, Predictor
from predictors.survival import EmpiricalSurvival

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "BalanceRoute Table 3: AUC and conditional MAE of survival, exact match and LightGBM; stand-ins for the paper's"
    " traces, of which recurring-long is synthetic"
)
SEEDS = (5, 1)
SEEDS_FROM = 910
WORKERS = 8
WINDOWS = (48, 96)
AIMED_WINDOW = 96
STRIDE_TOKENS = 16
"""Distance of the ages at which a request is asked about: the refresh of the routers (`ForecastConfig`)."""
MOST_ROWS = 20_000
SOURCES = ("survival", "exact match", "survival, ours", "exact match, ours", "lightgbm")
ALONE = replace(PROMPT, lengths=1_000, shrink=0.0)
"""The paper's per-prompt lengths: none but those of the prompt count, and all of them."""

# The paper's Table 3: stage-1 AUC and stage-2 MAE in tokens, by case and realisation.
PAPER: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "recurring-long": {"survival": (0.700, 20.1), "exact match": (0.974, 2.9)},
    "azure2024": {"survival": (0.993, 5.4), "exact match": (0.995, 5.4)},
}
DATASETS = {"recurring-long": "proprietary", "azure2024": "Azure 2024"}
AIMED = (("recurring-long", "survival"), ("recurring-long", "exact match"), ("azure2024", "survival"))
"""Rows with an aim: the paper's realisations, where the stand-in has what they read."""
AUC_WITHIN, MAE_WITHIN = 0.05, 0.25


def variants(quick: bool) -> list[Variant]:
    sizes = {"train_requests": 2_000, "test_requests": 500} if quick else {"train_requests": 8_000}
    return [
        Variant(case, {"case": case, "windows": list(WINDOWS), "test_requests": 2_000, **sizes})
        for case in PAPER
        if available(cluster.CASES[case].workload) and not (quick and case == "azure2024")
    ]


def run_one(config: Config, seed: int) -> Metrics:
    """Returns AUC, MAE and the share of rows that end within H of each source, by name and window."""
    case, requests = cluster.CASES[config["case"]], config["train_requests"]
    train = cluster.history(case, WORKERS, requests)
    rows = cluster.rows_of(case, "held_out", seed)[: config["test_requests"]]
    outcomes = [*train, *later(case, rows)]
    windows = tuple(config["windows"])
    held = HeldOut.of(outcomes, replay(outcomes), len(train), windows, STRIDE_TOKENS, MOST_ROWS)
    predictors = predictors_of(train)
    predictors["lightgbm"] = cluster.fitted(case, WORKERS, requests)
    found: dict[str, float | None] = {}
    for name in SOURCES:
        for window, scores in evaluate(name, predictors[name], held).by_window.items():
            found[f"auc/{name}/{window}"] = scores.roc_auc
            found[f"mae_tokens/{name}/{window}"] = scores.conditional_mae_tokens
            found[f"ends_share/{name}/{window}"] = scores.positives
    return found


def later(case: cluster.StandIn, rows: Sequence[WorkloadRequest]) -> list[Outcome]:
    """Returns the outcomes of requests that come after `cluster.history` at its rate, and last as long as its do."""
    sizing = cluster.Sizing.of(rows, WORKERS, case.slots, profiles.load(cluster.PROFILE))
    timed = transform.rebase(transform.at_rate(rows, cluster.OVERLOAD * sizing.requests_per_s))
    return [
        replace(one, finish_s=one.arrival.arrival_s + one.output_tokens * sizing.step_s)
        for one in outcomes_of(timed)
    ]


def predictors_of(train: Sequence[Outcome]) -> dict[str, Predictor]:
    """Returns the sources that need no fit of their own. Those that learn have learnt nothing yet, because the
    evaluation gives them the past first.
    """
    plain, ours = EmpiricalSurvival.fit(train, prior_weight=0.0), EmpiricalSurvival.fit(train)
    return {
        "survival": plain,
        "exact match": Memorised((ALONE,), plain),
        "survival, ours": ours,
        "exact match, ours": Memorised(EXACT_MATCH, ours),
    }


def compare(results: Results) -> list[Row]:
    rows = []
    for case in PAPER:
        if case not in results.variants:
            continue
        for source in SOURCES:
            for window in WINDOWS:
                rows += _rows(results, case, source, window)
    return rows


def _rows(results: Results, case: str, source: str, window: int) -> list[Row]:
    """Returns the rows of AUC and MAE of a source, as far as they were measured."""
    name = f"{DATASETS[case]} ({case}), {source}, H = {window}"
    auc, mae = PAPER[case].get(source, (None, None))
    wanted = (case, source) in AIMED and window == AIMED_WINDOW
    made = []
    for metric, what, paper, unit in (
        ("auc", "AUC", auc, ""),
        ("mae_tokens", "conditional MAE", mae, "tokens"),
    ):
        key = f"{metric}/{source}/{window}"
        if not results.measured(case, key):
            continue
        seen = results.spread(case, key)
        share = 100.0 * results.mean(case, f"ends_share/{source}/{window}")
        note = f"{share:.0f} % of the rows end within H" if metric == "auc" else ""
        row = Row(f"{name}: {what}", paper, seen.mean, unit, seen.half_width, note=note)
        if not wanted or paper is None:
            made.append(row)
        elif metric == "auc":
            made.append(
                aimed(row, f"within {AUC_WITHIN:g}", least=paper - AUC_WITHIN, most=paper + AUC_WITHIN)
            )
        else:
            least, most = (1.0 - MAE_WITHIN) * paper, (1.0 + MAE_WITHIN) * paper
            made.append(aimed(row, f"within {100 * MAE_WITHIN:g} %", least=least, most=most))
    return made


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    made, axes = look.figure(columns=2, rows=len(results.variants), height=2.6)
    for i, case in enumerate(results.variants):
        for panel, metric, label in (
            (axes[2 * i], "auc", "AUC"),
            (axes[2 * i + 1], "mae_tokens", "conditional MAE, tokens"),
        ):
            keys = {f"{s}, H = {w}": f"{metric}/{s}/{w}" for s in SOURCES for w in WINDOWS}
            seen = {
                name: results.spread(case, key) for name, key in keys.items() if results.measured(case, key)
            }
            look.bars(panel, {name: (s.mean, s.half_width) for name, s in seen.items()}, label, case)
    return {"balance_route_table3": made}
