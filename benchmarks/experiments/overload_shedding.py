"""Overload: the two sums by which `by_wait` may shed what it has taken, side by side (`shed_by`).

`forecast` sheds a queued request by the sum that took it, with all margins. `optimistic` sheds it only where the sum at
best misses the objective, too. Both refuse alike at the arrival. Three parts have what either might harm:

    classes    the cells, classes and loads of the experiment `overload`: goodput, waits, and times to refuse
    tenants    the requests and engines of `benchmarks.overload` in virtual time: classes and tenants together, which
               is where modest tenants were seen to get less than their shares
    shares     the mix "greedy" of the experiment `fairness`, with `vtc`: tenants of one class

The rule was written down before the first run. `optimistic` becomes the default if none of these conditions fails, and
`forecast` stays the default otherwise; all figures are means over the seeds:

1.  in `classes` and `tenants` its goodput is at least 99 % of that of `forecast`, in each cell, at each load;
2.  in `tenants` at 1.25 times capacity the least part of its fair share that a modest tenant gets is larger than with
    `forecast`; at every other load, and in `shares`, it is at most 1 point smaller;
3.  where the p99 of the TTFT of the interactive or of the standard requests that were not refused is within the
    objective with `forecast`, it is with `optimistic`;
4.  where half of the refusals take 50 ms at most with `forecast`, they do with `optimistic`, above 1.25 times capacity.

Beside them stands, without an aim, the share of the computed prompt tokens whose requests were shed later or missed
an objective: what sending requests in doubt costs the prefill engines. The seeds begin with 500, on which nothing was
tried. Not claimed: a live fleet; other policies of fairness or routing; classes that share (`class_ratio`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import fairness, overload
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.overload.figures import figures
from benchmarks.overload.load import Times, works
from benchmarks.overload.sides import CAPACITY_PER_S, MIXES
from benchmarks.overload.simulated import simulated
from policies.admission.by_wait import FORECAST, OPTIMISTIC, ByWait

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "what by_wait sheds after it was taken, by the forecast or only at best, side by side; synthetic requests"
)
SEEDS = (3, 1)
SEEDS_FROM = 500
FORMS = (FORECAST, OPTIMISTIC)
LEAST_GOODPUT = 0.99
MOST_LOST_SHARE = 0.01
DECIDES_AT = 1.25
"""Load, in multiples of the capacity, at which the least share of a modest tenant must become larger."""
AT_MOST_S = overload.AT_MOST_S
TENANTS = "tenants"
CLASSES, SHARES = (
    tuple(f"{part}, {cell}" for cell in cells)
    for part, cells in (("classes", overload.CELLS), ("shares", fairness.SHORT_OF))
)
GOODPUT = overload.GOODPUT


def variants(quick: bool) -> list[Variant]:
    classes = {"warmup_s": 40.0 if quick else 50.0, "measure_s": 40.0 if quick else 100.0}
    shares = {"warmup_s": 30.0 if quick else 60.0, "measure_s": 40.0 if quick else 120.0}
    # the times of the live benchmark, in seconds
    tenants = {"ramp_s": 15.0, "window_s": 20.0 if quick else 50.0, "after_s": 5.0}
    parts: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
        **{
            f"classes, {cell}": (overload.LOADS, {**of, **classes, "cell": cell, "admission": "by_wait"})
            for cell, of in overload.CELLS.items()
        },
        TENANTS: (overload.LOADS, tenants),
        **{
            f"shares, {cell}": (
                fairness.LOADS,
                {
                    **overload.CELLS[cell],
                    **shares,
                    "cell": cell,
                    "mix": "greedy",
                    "admission": "by_wait",
                    "fairness": "vtc",
                },
            )
            for cell in fairness.SHORT_OF
        },
    }
    return [
        Variant(
            _name(where, load, form), {**config, "where": where, "load": load, "params": {"shed_by": form}}
        )
        for where, (loads, config) in parts.items()
        for load in loads
        for form in FORMS
    ]


def _name(where: str, load: float, form: str) -> str:
    return f"{where}, load {load:g}, {form}"


def run_one(config: Config, seed: int) -> Metrics:
    if config["where"] == TENANTS:
        return _tenants(config, seed)
    return (overload if config["where"] in CLASSES else fairness).run_one(config, seed)


def _tenants(config: Config, seed: int) -> Metrics:
    """Returns the figures of the live benchmark's load in virtual time; each end of requests as a share of them."""
    times = Times(config["ramp_s"], config["window_s"], config["after_s"])
    load = works(MIXES["sim"], config["load"], CAPACITY_PER_S, times.sending_s, seed)
    found = figures(simulated(load, times, seed, config["params"]), times)
    ends = found.pop("ends")
    return {**found, **{f"ended/{end}": n / max(1, found["requests"]) for end, n in ends.items()}}


def compare(results: Results) -> list[Row]:
    rows: list[Row] = []
    for where in (*CLASSES, TENANTS, *SHARES):
        for load in _loads(results, where):
            at = f"{where}, load {load:g}"
            if where not in SHARES:
                rows += [_goodput(results, where, load, at), *_waits(results, where, load, at)]
                rows += _refusals(results, where, load, at)
            if where not in CLASSES:
                rows.append(_least_share(results, where, load, at))
            else:
                rows.append(_wasted(results, where, load, at))
    missed = [row.name for row in rows if row.met is False]
    named = FORECAST if missed else OPTIMISTIC
    used = ByWait().shed_by
    verdict = Row(
        "conditions of the rule that optimistic misses", None, float(len(missed)), "", None, "0", not missed,
        "; ".join(missed),
    )  # fmt: skip
    chosen = Row(
        "the default is what the rule names", None, None, "", None, named, named == used, f"in use: {used}"
    )
    return [*rows, verdict, chosen]


def _loads(results: Results, where: str) -> list[float]:
    return sorted({results.variants[name]["load"] for name in results.where(where=where)})


def _goodput(results: Results, where: str, load: float, at: str) -> Row:
    base, ours = (_name(where, load, form) for form in FORMS)
    found = results.paired(base, ours, GOODPUT)
    share = found.ours.mean / found.base.mean if found.base.mean else 1.0
    note = f"{found.ours.mean:.0f} of {found.base.mean:.0f} tokens/s"
    what = f"{at}: goodput with optimistic, share of that with forecast"
    return Row(what, None, 100.0 * share, "%", None, ">= 99", share >= LEAST_GOODPUT, note)


def _waits(results: Results, where: str, load: float, at: str) -> list[Row]:
    """Returns rows with the p99 of the TTFT of classes, with an aim where `forecast` is within the objective."""
    base, ours = (_name(where, load, form) for form in FORMS)
    patience = results.variants[ours].get("patience", 1.0)
    rows = []
    for name in ("interactive", "standard"):
        metric, slo_s = f"ttft_p99_s/{name}", overload.CLASSES[name][2] * patience
        if not all(results.measured(one, metric) for one in (base, ours)):
            continue
        before_s, after = results.mean(base, metric), results.spread(ours, metric)
        what = f"{at}: p99 TTFT of the {name} requests that were not refused, with optimistic"
        note = f"with forecast {before_s:.2f} s"
        row = Row(what, None, after.mean, "s", after.half_width, note=note)
        rows.append(aimed(row, f"<= {slo_s:g}", most=slo_s) if before_s <= slo_s else row)
    return rows


def _refusals(results: Results, where: str, load: float, at: str) -> list[Row]:
    """Returns a row with the time to refuse, with an aim where `forecast` is quick enough, above `DECIDES_AT`."""
    base, ours = (_name(where, load, form) for form in FORMS)
    metric = "refusal_p50_s"
    if load <= DECIDES_AT or not all(results.measured(one, metric) for one in (base, ours)):
        return []
    before_s, after_s = results.mean(base, metric), results.mean(ours, metric)
    aim = f"<= {AT_MOST_S:g}" if before_s <= AT_MOST_S else ""
    met = after_s <= AT_MOST_S if aim else None
    what = f"{at}: time to refuse with optimistic, half of all"
    return [Row(what, None, after_s, "s", None, aim, met, f"with forecast {before_s:.3f} s")]


def _least_share(results: Results, where: str, load: float, at: str) -> Row:
    before, after = (_least_part(results, _name(where, load, form)) for form in FORMS)
    decides = where == TENANTS and load == DECIDES_AT
    met = after > before if decides else after >= before - MOST_LOST_SHARE
    aim = f"> {100 * before:.2f}" if decides else f">= {100 * (before - MOST_LOST_SHARE):.2f}"
    what = f"{at}: least part of its fair share that a modest tenant gets with optimistic"
    return Row(what, None, 100.0 * after, "%", None, aim, met, f"with forecast {100 * before:.1f} %")


def _least_part(results: Results, variant: str) -> float:
    """Returns the least mean part of its fair share that a modest tenant gets."""
    return min(results.mean(variant, f"part_of_share/{name}") for name in fairness.MODEST)


def _wasted(results: Results, where: str, load: float, at: str) -> Row:
    before, after = (100.0 * results.mean(_name(where, load, form), "wasted_prefill_share") for form in FORMS)
    what = f"{at}: computed prompt tokens of requests that were shed later or late, with optimistic"
    return Row(what, None, after, "%", note=f"with forecast {before:.2f} %")


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    made, axes = look.figure(columns=len(CLASSES) + 1)
    for axis, where in zip(axes, CLASSES, strict=False):
        loads = _loads(results, where)
        series = {
            form: look.Series(loads, [results.mean(_name(where, load, form), GOODPUT) for load in loads])
            for form in FORMS
        }
        look.lines(axis, series, "offered load / capacity", "goodput, tokens/s", where, log_x=True)
    loads = _loads(results, TENANTS)
    series = {
        form: look.Series(loads, [_least_part(results, _name(TENANTS, load, form)) for load in loads])
        for form in FORMS
    }
    look.lines(
        axes[-1], series, "offered load / capacity", "least part of a modest tenant", TENANTS, log_x=True
    )
    return {"overload_shedding": made}
