"""A day with a peak of three times its mean: engine time and attainment of fixed fleets and of scaling policies.

The rate follows exp(k cos) with k = 1.755, whose peak is 3.0 times its mean; the day is compressed to 40 minutes, in
which a cold start still takes 55 s. Fixed fleets of 10 to 12 engines are divided in every way near what the peak needs;
the best is the cheapest with 99 % of the requests in time, and among equally cheap ones that with the most in time
(where none has 99 %, it is the one with the most in time). At first there were only 5P5D, 5P6D and 6P6D; the other
divisions were added so that a cheaper one would show. The plan of one who foresees each step's mean rate
(`scaling_common.foreseen`) bounds what scaling can save. All policies begin with the fleet that the first minute needs.
Parameters are those that `scaling_tuning` found on other seeds, for ours as for the rivals. In a first report ours had
a point below the 99 % that are aimed at, because the search weighed lateness against engines; the search's rule was
changed then, and the aims and the seeds stayed. Nearly all late requests of the two worst seeds came in one minute of
the rise, about one cold start long, in which a decode engine was on its way.

Two rivals take less engine time than ours and serve few requests in time, so neither is better in both. Ours with a
budget (`BUDGETS`) is as cheap as they are, and stands beside them. It was added after the results of the rivals were
known, without an aim.

What separates ours from the plan that foresees is mostly that the day is short beside starts, windows and delays. The
policy alone was run, with engines that never queue, in which it takes 4.56 h (4 seeds) and the foreseeing plan 3.68 h.
Where windows have the mean number of requests, and not what chance brings, it takes 4.28 h, and 4.04 h if engines may
go at once. The rest is the forecast: it follows a rate that doubles in some minutes by windows of 10 s, keeps the
surprise of the rise for 128 windows, which is half of this day, and looks ahead by the 55 s of a start. In a day six
times as long, without that noise and with the calm, ours takes 3.77 h. `python -m benchmarks.aims.probes day` asks the
simulator for a day four times as long; it has not been run yet.

Aims, written before the first run: ours has at least 99 % of the attainment of the best fixed fleet, at most 60 % of
its engine time, and at most 1.25 times that of the foreseeing plan; no rival is better than ours in both attainment and
engine time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.experiments.scaling_common import (
    CHAT,
    FIRST_SEED,
    OURS,
    RIVALS,
    against,
    fewest,
    foreseen,
    kept,
    measured,
    plane,
    policy,
    requests,
    run,
)
from benchmarks.experiments.scaling_tuned import FORESEEN_HEADROOM, TUNED
from benchmarks.sim.fleet_setup import STARTS
from benchmarks.workloads.record import WorkloadRequest
from policies.scaling.base import Counts, Limits, ScalingPolicy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "a day with a peak of 3 times its mean, in 40 minutes: engine time and attainment of scaling policies"
)
SEEDS = (8, 1)
SEEDS_FROM = FIRST_SEED
DAY_S, STEP_S = 2_400.0, 20.0
MEAN_PER_S, SHARPNESS = 0.5, 1.755
# Every P:D of 10 to 12 engines whose numbers differ by at most three; `fewest` gives 6P7D for the peak.
FIXED = tuple((p, n - p) for n in (10, 11, 12) for p in range(1, n) if abs(n - 2 * p) <= 3)
FIXED_QUICK = ((5, 6), (6, 6))
LIMITS = Limits(prefill_max=12, decode_max=10, warm_max=6, budget=24)
FORESEEN = "foreseen"
BUDGETS = (2, 5)
"""Engines of ours, warm and starting ones included, that take no more time all day than `regime_rule` and `demand_rate`
have taken: 1.333 h and 3.518 h of 40 minutes an engine."""


def rates() -> list[float]:
    """Returns the rate of each step of the day in requests/s; the day begins at its trough."""
    steps = round(DAY_S / STEP_S)
    shape = [math.exp(-SHARPNESS * math.cos(2.0 * math.pi * (i + 0.5) / steps)) for i in range(steps)]
    return [MEAN_PER_S * one * steps / sum(shape) for one in shape]


def _with_budget(budget: int) -> str:
    return f"{OURS}, budget of {budget}"


def variants(quick: bool) -> list[Variant]:
    fixed = FIXED_QUICK if quick else FIXED
    found = [
        Variant(f"fixed {p}P{d}D", {"policy": "fixed", "params": {"prefill": p, "decode": d}})
        for p, d in fixed
    ]
    found += [Variant(name, {"policy": name, "params": TUNED[name]}) for name in (*RIVALS, OURS)]
    found.append(Variant(FORESEEN, {"policy": FORESEEN, "params": {"headroom": FORESEEN_HEADROOM}}))
    budgets = () if quick else BUDGETS
    return found + [
        Variant(_with_budget(budget), {"policy": OURS, "params": TUNED[OURS], "budget": budget})
        for budget in budgets
    ]


@functools.lru_cache(maxsize=2)
def work(seed: int) -> tuple[WorkloadRequest, ...]:
    return tuple(requests(CHAT, rates(), STEP_S, seed))


def made(name: str, params: Config, limits: Limits = LIMITS) -> tuple[ScalingPolicy, Counts]:
    """Returns a policy and the engines with which its day begins."""
    if name == "fixed":
        first = Counts(params["prefill"], params["decode"])
        return policy(name, params, limits), first
    if name == FORESEEN:
        plan = foreseen(CHAT, rates(), STEP_S, params["headroom"], STARTS["cold"].total_s)
        return plan, plan.timetable[0][1]
    return policy(name, params, limits), fewest(CHAT, rates()[0])


def run_one(config: Config, seed: int) -> Metrics:
    limits = LIMITS
    if "budget" in config:
        limits = dataclasses.replace(LIMITS, budget=config["budget"])
    scaling, first = made(config["policy"], config["params"], limits)
    return kept(run(work(seed), first, scaling, seed, 0.0, DAY_S, period_s=1.0))


def best_fixed(results: Results) -> str:
    """Returns the cheapest fixed fleet with 99 % in time, of equally cheap ones that with the most; or the one with the
    most in time, where none has 99 %.
    """
    shares = {name: results.mean(name, "slo_share") for name in results.variants if name.startswith("fixed")}
    enough = [name for name in shares if shares[name] >= 0.99]
    if enough:
        return min(enough, key=lambda name: (round(results.mean(name, "fleet/engine_s")), -shares[name]))
    return max(shares, key=lambda name: shares[name])


def compare(results: Results) -> list[Row]:
    best = best_fixed(results)
    share, share_half = results.ratio(OURS, best, "slo_share")
    saved, half = results.reduction_percent(best, OURS, "fleet/engine_s")
    over, over_half = results.reduction_percent(FORESEEN, OURS, "fleet/engine_s")
    rows = [
        aimed(
            Row(
                f"attainment of ours, of that of {best}",
                None,
                100.0 * share,
                "%",
                None if share_half is None else 100.0 * share_half,
            ),
            ">= 99",
            least=99.0,
        ),
        aimed(
            Row(f"engine time of ours, of that of {best}", None, 100.0 - saved, "%", half),
            "<= 60",
            most=60.0,
        ),
        aimed(
            Row("engine time of ours, of the foreseeing plan's", None, 100.0 - over, "%", over_half),
            "<= 125",
            most=125.0,
        ),
    ]
    rows += [against(results, OURS, rival, f"ours against {rival}") for rival in RIVALS]
    rows += [row for rival in RIVALS for row in _as_cheap(results, rival)]
    rows += measured(results)
    shares = [100.0 * one for one in results.values(OURS, "slo_share")]
    note = "by seed: " + ", ".join(f"{one:.2f}" for one in shares)
    rows.append(Row(f"{OURS}: requests in time on the worst seed", None, min(shares), "%", note=note))
    return rows


def _as_cheap(results: Results, rival: str) -> Iterator[Row]:
    """Yields a row of the requests in time of ours with the largest budget that takes no more engine time than the
    rival, in the mean, less those of the rival; none where no budget is as cheap.
    """
    most_s = round(results.mean(rival, "fleet/engine_s"))
    names = [name for name in map(_with_budget, BUDGETS) if name in results.variants]
    cheap = [name for name in names if round(results.mean(name, "fleet/engine_s")) <= most_s]
    if cheap:
        gain = results.paired(rival, cheap[-1], "slo_share").difference
        half = None if gain.half_width is None else 100.0 * gain.half_width
        saved, _ = results.reduction_percent(rival, cheap[-1], "fleet/engine_s")
        note = f"{cheap[-1]}; engine time {0.0 - saved:+.1f} %"
        yield Row(
            f"ours as cheap as {rival}: requests in time", None, 100.0 * gain.mean, "points", half, note=note
        )


def plots(results: Results) -> dict[str, Figure]:
    return {"diurnal": plane(results, list(results.variants), "engine time of the day, h")}
