"""The worth of forecasts of departures and of lengths, by their quality and by the regime of the cluster.

The paper's BR-H looks H steps ahead. Whether that pays depends on the pool, on the outputs and on the arrivals, so the
cells of `forecast_cluster` vary all three. In each of them run

    BR-0          sees no forecast: the base of every gain
    printed       the paper's own BR-H with the gamma and beta that the paper prints
    tuned         the same with the values of `balance_route_tuning`
    expected      printed, but each request leaves the projection in part, by its chance to end (`forecast_expected`)
    composition   this project's own, which also orders the pool by forecast lengths; parameters of `composition_tuning`

and each rule gets forecasts of several sources: none, a dial of known quality (`forecast_dial`), survival, exact match,
LightGBM, which is the deployed one, and the oracle. AUC and conditional MAE of every source are measured in the runs.
The dial runs with "printed", whose least quality is asked for, and with the composition. ("tuned" and "expected" had
two dials each, which were left out before the first whole run: no rule below reads them, and each run takes seconds.)
`balance_route_table3` compares the AUC and MAE of predictors with the paper's Table 3.

The rule was written down before the first full run. A *gain* is the difference in per cent of the base, seed by seed.

1.  Forecasts of a source *add* to a rule in a cell, for a metric, if the 95 % intervals of the gain over BR-0 and of
    the gain over the same rule without forecasts lie above 0, and the mean of the latter is `LEAST_PERCENT` at least.
2.  Where those of the oracle add, the deployed predictor is to keep 95 % or more of what they add. What they add is
    counted against the same rule without forecasts: against BR-0, a rule that ignores its forecasts would keep all.
    Elsewhere there is nothing to keep, and the row is open.
3.  Forecasts are *worth their cost for balance* in a cell if those of the deployed predictor add to the balance of
    BR-H in some form, and make neither throughput nor the p99 of TTFT significantly worse than that form has them
    without. The aim is half of the cells. If it is missed, README and design say that forecasts are not worth their
    cost for balance, but for the cells that are named, and for what else they are worth by rule 4.
4.  Forecasts are *worth their cost for waiting* in a cell if those of the deployed predictor add to the mean TTFT of
    the composition, and do not make throughput significantly worse.

At this level one in forty comparisons without an effect looks like a gain, and rule 3 looks at three forms in each
cell. The seeds begin with 900, on which nothing was tuned; the loads of the cells were chosen on seeds 800 and 801 by
the pool and the slots of BR-0.

In the cells "long" requests outrun the cluster, so TTFT there is what was waited within the run, and only tells
policies apart that let some wait longer than others. Not claimed: the H, gamma and beta that would be best in each
cell; lengths in admission control and transfer deadlines, which no policy here reads; any cost of making forecasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments import composition
from benchmarks.experiments import forecast_cluster as cells
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.seeds import Spread, ratio, spread
from benchmarks.sim import profiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "what forecasts are worth to BR-H and the composition, by AUC, pool, outputs and arrivals; synthetic requests"
SEEDS = (7, 2)
SEEDS_FROM = 900
LEAST_PERCENT = 1.0
NONE, DEPLOYED, ORACLE = "no forecasts", "lightgbm", "oracle"
BASE = "BR-0"
COMPOSITION = "composition"
AUCS = (0.5, 0.7, 0.8, 0.9, 0.97)
RULES: Mapping[str, tuple[str, ...]] = {
    BASE: (NONE,),
    "printed": (NONE, *(f"dial {auc:g}" for auc in AUCS), *cells.PREDICTORS, ORACLE),
    "tuned": (NONE, DEPLOYED, ORACLE),
    "expected": ("survival", DEPLOYED, ORACLE),
    COMPOSITION: (NONE, "dial 0.7", "dial 0.9", DEPLOYED, ORACLE),
}
"""The sources of forecasts with which each rule runs. "expected" without forecasts is "printed" without them."""
FORMS = ("printed", "tuned", "expected")
QUICK_CELLS = (("long", "near"), ("short", "capped"))
QUICK_SOURCES = (NONE, "dial 0.7", DEPLOYED, ORACLE)

IMBALANCE, TTFT, P99, TPOT, RATE = (
    "imbalance_tokens", "ttft_mean_s", "ttft_p99_s", "tpot_p95_ms", "throughput_tok_s",
)  # fmt: skip
METRICS: Mapping[str, tuple[str, float]] = {
    IMBALANCE: ("imbalance", -1.0),
    TTFT: ("mean TTFT", -1.0),
    P99: ("p99 TTFT", -1.0),
    TPOT: ("TPOT P95", -1.0),
    RATE: ("throughput", 1.0),
}
"""The name of each metric, and 1 if more of it is better, else -1."""


# ---------------------------------------------------------------------------------------------------------- variants


def variants(quick: bool) -> list[Variant]:
    chosen = QUICK_CELLS if quick else cells.CELLS
    return [
        Variant(_name(f"{pool} {outputs}", rule, source), _config(pool, outputs, rule, source, quick))
        for pool, outputs in chosen
        for rule, sources in RULES.items()
        for source in sources
        if not quick or source in QUICK_SOURCES
    ]


def _name(cell: str, rule: str, source: str) -> str:
    return f"{cell}, {rule}, {source}"


def _config(pool: str, outputs: str, rule: str, source: str, quick: bool) -> dict[str, Any]:
    """Returns the config of a run; cell, rule and label stand in it for the rows and plots."""
    policy, params = policy_of(rule)
    return {
        "cell": f"{pool} {outputs}",
        "rule": rule,
        "label": source,
        "pool": pool,
        "outputs": outputs,
        "size": 0.4 if quick else 1.0,
        "policy": policy,
        "params": params,
        "source": None if source == NONE else source,
        "expected": rule == "expected",
    }


def policy_of(rule: str) -> tuple[str, dict[str, Any]]:
    """Returns the decode policy and the parameters of a rule."""
    if rule == COMPOSITION:
        t = profiles.load(cluster.PROFILE)
        own = {
            "step_base_s": t.decode_base_s,
            "step_per_seq_s": t.decode_per_seq_s,
            "seconds_per_kv_token": t.decode_per_kv_token_s,
        }
        return "composition", {**own, **composition.TUNED[COMPOSITION]}
    method = {BASE: "br_0", "tuned": "br_h oracle"}.get(rule, f"{cluster.PRINTED} oracle")
    config = cluster.config_of("recurring-long", method, cells.WORKERS, False)
    return config["policy"], dict(config["params"])


def run_one(config: Config, seed: int) -> Metrics:
    return cells.run(config, seed)


# -------------------------------------------------------------------------------------------------------------- rows


def compare(results: Results) -> list[Row]:
    found = names(results)
    rows = [*_regimes(results, found), *_accuracy(results, found)]
    for cell in found:
        for rule, sources in RULES.items():
            if rule != BASE:
                rows += [_gain(results, cell, rule, s) for s in sources if _has(results, cell, rule, s)]
    for cell in found:
        rows += _shares(results, cell)
    return [*rows, *_least_auc(results, found), *_verdicts(results, found)]


def names(results: Results) -> list[str]:
    """Returns the names of the cells of the results, in their order."""
    return list(dict.fromkeys(config["cell"] for config in results.variants.values()))


def _has(results: Results, cell: str, rule: str, source: str) -> bool:
    return _name(cell, rule, source) in results.variants


def _without(cell: str, rule: str) -> str:
    """Returns the variant of a rule without forecasts."""
    return _name(cell, "printed" if rule == "expected" else rule, NONE)


def gains(results: Results, base: str, ours: str, metric: str) -> list[float]:
    """Returns by how many per cent of `base` the variant `ours` is better, for each seed."""
    sign = METRICS[metric][1]
    pairs = zip(results.values(base, metric), results.values(ours, metric), strict=True)
    return [100.0 * sign * (b - a) / a for a, b in pairs]


def adds(results: Results, cell: str, rule: str, source: str, metric: str) -> bool:
    """Returns whether forecasts of a source add to a rule (rule 1 of the module docstring). One seed shows nothing."""
    ours = _name(cell, rule, source)
    over_base = spread(gains(results, _name(cell, BASE, NONE), ours, metric))
    over_none = spread(gains(results, _without(cell, rule), ours, metric))
    return _above(over_base) and _above(over_none) and over_none.mean >= LEAST_PERCENT


def _above(gain: Spread) -> bool:
    return gain.low is not None and gain.low > 0.0


def harms(results: Results, cell: str, rule: str, source: str, metric: str) -> bool:
    """Returns whether a metric is significantly worse with forecasts of a source than without any."""
    gain = spread(gains(results, _without(cell, rule), _name(cell, rule, source), metric))
    return gain.high is not None and gain.high < 0.0


def kept(results: Results, cell: str, rule: str, source: str, metric: str) -> tuple[float, float | None]:
    """Returns the share in per cent that a source keeps of what the oracle adds, and half of its 95 % interval.

    It is the ratio of the mean gains over the rule without forecasts (`benchmarks.seeds.ratio`).
    """
    base = _without(cell, rule)
    ours = gains(results, base, _name(cell, rule, source), metric)
    whole = gains(results, base, _name(cell, rule, ORACLE), metric)
    share, half = ratio(ours, whole)
    return 100.0 * share, None if half is None else 100.0 * half


def _regimes(results: Results, found: Sequence[str]) -> Iterator[Row]:
    """Yields rows that show what the names of the cells mean, with BR-0."""
    for cell in found:
        base = _name(cell, BASE, NONE)
        config = results.variants[base]
        slots = cells.WORKERS * cells.POOLS[config["pool"]].slots
        pooled, running = results.spread(base, "pooled"), results.spread(base, "running")
        note = f"{running.mean:.1f} of {slots} slots run"
        yield Row(
            f"{cell}, {BASE}: requests in the pool", None, pooled.mean, "", pooled.half_width, note=note
        )


def _accuracy(results: Results, found: Sequence[str]) -> Iterator[Row]:
    """Yields AUC and conditional MAE of each source in the runs of "printed", by kind of outputs."""
    by_kind: dict[str, list[str]] = {}
    for cell in found:
        by_kind.setdefault(cell.split()[1], []).append(cell)
    for kind, of in by_kind.items():
        for source in RULES["printed"][1:]:
            runs = [_name(cell, "printed", source) for cell in of if _has(results, cell, "printed", source)]
            if not runs or not all(results.measured(run, "auc") for run in runs):
                continue
            auc, mae = (_over(results, runs, metric) for metric in ("auc", "mae_tokens"))
            passed, right = (
                [results.mean(run, metric) for run in runs if results.measured(run, metric)]
                for metric in ("gate_share", "gate_right")
            )
            note = f"{100.0 * spread(passed).mean:.1f} % of the refreshes pass the gate"
            note += f", {100.0 * spread(right).mean:.0f} % of these rightly" if right else ""
            name = f"{kind} outputs, {source}"
            yield Row(f"{name}: AUC in the runs", None, auc.mean, "", auc.half_width, note=note)
            yield Row(f"{name}: conditional MAE in the runs", None, mae.mean, "tokens", mae.half_width)


def _over(results: Results, runs: Sequence[str], metric: str) -> Spread:
    """Returns the spread over the seeds of the mean over the variants `runs`."""
    by_run = [results.values(run, metric) for run in runs]
    return spread([sum(of_seed) / len(of_seed) for of_seed in zip(*by_run, strict=True)])


def _gain(results: Results, cell: str, rule: str, source: str) -> Row:
    """Returns a row with the gain in balance over BR-0; its note has the other metrics, and what forecasts add."""
    base, ours = _name(cell, BASE, NONE), _name(cell, rule, source)
    gain = spread(gains(results, base, ours, IMBALANCE))
    parts = [
        f"{METRICS[m][0]} {_shown(spread(gains(results, base, ours, m)))}"
        for m in (TTFT, P99, TPOT, RATE)
        if results.measured(base, m) and results.measured(ours, m)
    ]
    if source != NONE:
        over = spread(gains(results, _without(cell, rule), ours, IMBALANCE))
        parts.append(f"imbalance against no forecasts {_shown(over)}")
    note = "better by, in %: " + ", ".join(parts)
    return Row(f"{ours}: imbalance below BR-0's", None, gain.mean, "%", gain.half_width, note=note)


def _shown(gain: Spread) -> str:
    return f"{gain.mean:+.1f}" + ("" if gain.half_width is None else f" (+- {gain.half_width:.1f})")


def _shares(results: Results, cell: str) -> Iterator[Row]:
    """Yields the share that each predictor keeps of what the oracle adds, by rule and metric."""
    for rule in (*FORMS, COMPOSITION):
        if not (_has(results, cell, rule, ORACLE) and _without(cell, rule) in results.variants):
            continue
        for metric in (IMBALANCE, RATE) if rule in FORMS else (TTFT,):
            adding = adds(results, cell, rule, ORACLE, metric)
            over = spread(gains(results, _without(cell, rule), _name(cell, rule, ORACLE), metric))
            for source in cells.PREDICTORS:
                if not _has(results, cell, rule, source):
                    continue
                share, half = kept(results, cell, rule, source, metric) if adding else (None, None)
                says = "the oracle adds" if adding else "the oracle does not add enough:"
                name = (
                    f"{cell}, {rule}: share of what the oracle adds that {source} keeps, {METRICS[metric][0]}"
                )
                row = Row(name, None, share, "%", half, note=f"{says} {_shown(over)} %")
                yield aimed(row, ">= 95", least=95.0) if source == DEPLOYED else row


def _least_auc(results: Results, found: Sequence[str]) -> Iterator[Row]:
    """Yields for each cell the least AUC, as measured, of a dial from which on all better dials and the oracle add to
    the balance of "printed"; None where not even the oracle does.
    """
    dials = RULES["printed"][1 : 1 + len(AUCS)]
    for cell in found:
        run = [s for s in (*dials, ORACLE) if _has(results, cell, "printed", s)]
        least = None
        for source in reversed(run):
            if not adds(results, cell, "printed", source, IMBALANCE):
                break
            least = results.mean(_name(cell, "printed", source), "auc")
        yield Row(f"{cell}, printed: least AUC from which forecasts add to the balance", None, least)


def worth_for_balance(results: Results, cell: str, source: str) -> list[str]:
    """Returns the forms of BR-H for which forecasts of a source are worth their cost for balance (rule 3)."""
    return [
        rule
        for rule in FORMS
        if _has(results, cell, rule, source)
        and _without(cell, rule) in results.variants
        and adds(results, cell, rule, source, IMBALANCE)
        and not any(harms(results, cell, rule, source, metric) for metric in (RATE, P99))
    ]


def worth_for_waiting(results: Results, cell: str, source: str) -> bool:
    """Returns whether forecasts of a source are worth their cost for waiting (rule 4)."""
    return (
        _has(results, cell, COMPOSITION, source)
        and adds(results, cell, COMPOSITION, source, TTFT)
        and not harms(results, cell, COMPOSITION, source, RATE)
    )


def _verdicts(results: Results, found: Sequence[str]) -> Iterator[Row]:
    unit = f"of {len(found)}"
    for source in (ORACLE, DEPLOYED):
        forms = {cell: worth_for_balance(results, cell, source) for cell in found}
        in_cells = [f"{cell} ({', '.join(of)})" for cell, of in forms.items() if of]
        asked = source == DEPLOYED and len(results.seeds) > 1
        aim = "at least half" if source == DEPLOYED else ""
        reached = 2 * len(in_cells) >= len(found) if asked else None
        name = f"cells in which forecasts of {source} are worth their cost for balance"
        yield Row(name, None, float(len(in_cells)), unit, None, aim, reached, "; ".join(in_cells) or "none")
        waiting = [cell for cell in found if worth_for_waiting(results, cell, source)]
        name = f"cells in which forecasts of {source} are worth their cost for waiting"
        yield Row(name, None, float(len(waiting)), unit, note="; ".join(waiting) or "none")
    idle = [
        cell
        for cell in found
        if not any(
            adds(results, cell, rule, ORACLE, IMBALANCE) or adds(results, cell, rule, ORACLE, RATE)
            for rule in FORMS
            if _has(results, cell, rule, ORACLE) and _without(cell, rule) in results.variants
        )
    ]
    name = "cells in which not even the oracle adds to balance or throughput of BR-H"
    yield Row(name, None, float(len(idle)), unit, note="; ".join(idle) or "none")


# ------------------------------------------------------------------------------------------------------------- plots


def plots(results: Results) -> dict[str, Figure]:
    """Draws the gain over BR-0 by the AUC that was measured, a panel for each cell and a figure for each metric."""
    from benchmarks import plots as look

    found, made = names(results), {}
    for metric, name in ((IMBALANCE, "imbalance"), (TTFT, "ttft"), (RATE, "throughput")):
        columns = min(3, len(found))
        figure, axes = look.figure(columns, -(-len(found) // columns), 4.8, 2.9)
        for axis, cell in zip(axes, found, strict=False):
            label = f"{METRICS[metric][0]} better by, %"
            look.lines(axis, _lines(results, cell, metric), "AUC", label, cell)
        for axis in axes[len(found) :]:
            axis.set_visible(False)
        made[f"forecast_value_{name}"] = figure
    return made


def _lines(results: Results, cell: str, metric: str) -> dict[str, Any]:
    """Returns a line for each rule through its dials and the oracle, and the deployable predictors as points."""
    base = _name(cell, BASE, NONE)
    series: dict[str, Any] = {}
    for rule, sources in RULES.items():
        line = [
            s
            for s in sources
            if (s.startswith("dial ") or s == ORACLE)
            and _has(results, cell, rule, s)
            and results.measured(_name(cell, rule, s), "auc")
        ]
        if line:
            series[rule] = _series(results, base, [_name(cell, rule, s) for s in line], metric)
    for source in cells.PREDICTORS:
        ours = _name(cell, "printed", source)
        if ours in results.variants and results.measured(ours, "auc"):
            series[source] = _series(results, base, [ours], metric)
    return series


def _series(results: Results, base: str, runs: Sequence[str], metric: str) -> Any:
    from benchmarks import plots as look

    seen = [spread(gains(results, base, run, metric)) for run in runs]
    aucs = [results.mean(run, "auc") for run in runs]
    return look.Series(aucs, [s.mean for s in seen], [s.half_width for s in seen])
