"""A burst of eight times the load: attainment over the number of engines that wait warm, and its knee.

After three minutes at 0.2 requests/s come three at 1.6, then three at 0.2 again. A cold start takes 55 s, a third of
the burst. The pool has 0 to 20 warm engines (`warm_min` = `warm_max`); the knee is the smallest pool within half a
point of the attainment of the largest. Where that is the largest pool itself, attainment may still rise beyond it, and
no knee is found. The rivals have the pool of `RIVAL_POOL` engines.

A first run at twice the rates had bounds that the burst exceeded for every policy; rates and bounds were changed then,
the aims stayed but for the number of engines. At first the largest pool had 12 engines, so a knee above 12 could not
show. Pools of 16 and 20 were added, and the budget was raised so that it binds for none of them.

Aims, written before the first run: attainment does not fall with the pool, and has a knee at or below the 12 engines
that the burst needs more; no rival is better than ours with the same pool in both attainment and engine time.

With the same pool two rivals are cheaper than ours, since they add few engines or none, and are less often in time, so
that aim is open for them. After the results were known, rows were added of the cheapest own pool that is in time as
often as the rival. They have no aim, and are made from the runs that there were.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant
from benchmarks.experiments.scaling_common import (
    CHAT,
    FIRST_SEED,
    OURS,
    RIVALS,
    against,
    beside,
    fewest,
    kept,
    measured,
    policy,
    requests,
    run,
)
from benchmarks.experiments.scaling_tuned import TUNED
from benchmarks.workloads.record import WorkloadRequest
from policies.scaling.base import Limits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "a burst of eight times the load: attainment over the number of warm engines"
SEEDS = (8, 1)
SEEDS_FROM = FIRST_SEED
POOLS = (0, 4, 8, 12, 16, 20)
RIVAL_POOL = 8
PART_S, LOW_PER_S, TIMES = 180.0, 0.2, 8.0
LIMITS = Limits(prefill_max=14, decode_max=14, budget=28 + max(POOLS))
KNEE = 0.5
"""Percentage points below the largest pool's attainment at which a pool counts as large enough."""


def _name(pool: int) -> str:
    return f"{OURS}, pool of {pool}"


def variants(quick: bool) -> list[Variant]:
    pools = POOLS[::3] + ((RIVAL_POOL,) if RIVAL_POOL not in POOLS[::3] else ()) if quick else POOLS
    found = [Variant(_name(n), {"policy": OURS, "params": TUNED[OURS], "pool": n}) for n in sorted(pools)]
    return found + [
        Variant(name, {"policy": name, "params": TUNED[name], "pool": RIVAL_POOL}) for name in RIVALS
    ]


@functools.lru_cache(maxsize=2)
def work(seed: int) -> tuple[WorkloadRequest, ...]:
    return tuple(requests(CHAT, [LOW_PER_S, LOW_PER_S * TIMES, LOW_PER_S], PART_S, seed))


def run_one(config: Config, seed: int) -> Metrics:
    """Measures from a minute before the burst to the end."""
    pool = config["pool"]
    limits = dataclasses.replace(LIMITS, warm_min=pool, warm_max=pool)
    scaling = policy(config["policy"], config["params"], limits)
    result = run(work(seed), fewest(CHAT, LOW_PER_S), scaling, seed, PART_S - 60.0, 2.0 * PART_S + 60.0, pool)
    return kept(result)


def compare(results: Results) -> list[Row]:
    pools = sorted(c["pool"] for c in results.variants.values() if c["policy"] == OURS)
    shares = {n: 100.0 * results.mean(_name(n), "slo_share") for n in pools}
    rising = all(shares[b] >= shares[a] - KNEE for a, b in itertools.pairwise(pools))
    knee = next((n for n in pools[:-1] if shares[n] >= shares[pools[-1]] - KNEE), None)
    at, met, note = (
        (None, False, f"not found up to {pools[-1]}") if knee is None else (float(knee), knee <= 12, "")
    )
    ends = f"{shares[pools[0]]:.1f} % without a pool, {shares[pools[-1]]:.1f} % with {pools[-1]}"
    rows = [
        Row("attainment does not fall with the pool", None, None, "", None, "rising", rising, ends),
        Row("the knee of attainment over the pool", None, at, "engines", None, "<= 12", met, note),
    ]
    rows += [against(results, _name(RIVAL_POOL), rival, f"ours against {rival}") for rival in RIVALS]
    return rows + [row for rival in RIVALS for row in _as_good(results, pools, rival)] + measured(results)


def _as_good(results: Results, pools: Sequence[int], rival: str) -> Iterator[Row]:
    """Yields a row of the cheapest pool of ours that has as much in time as the rival, in the mean; none where no pool
    has.
    """
    least = results.mean(rival, "slo_share")
    good = [n for n in pools if results.mean(_name(n), "slo_share") >= least]
    if good:
        cheapest = min(good, key=lambda n: results.mean(_name(n), "fleet/engine_s"))
        row = beside(results, _name(cheapest), rival, f"ours in time as often as {rival}")
        yield dataclasses.replace(row, note=f"pool of {cheapest}; {row.note}")


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    made, axes = look.figure()
    pools = sorted(c["pool"] for c in results.variants.values() if c["policy"] == OURS)
    spreads = [results.spread(_name(n), "slo_share") for n in pools]
    ours = look.Series(
        pools,
        [100.0 * s.mean for s in spreads],
        [None if s.half_width is None else 100.0 * s.half_width for s in spreads],
    )
    others = {
        name: look.Series([RIVAL_POOL], [100.0 * results.mean(name, "slo_share")], quiet=True)
        for name in RIVALS
    }
    look.lines(axes[0], {OURS: ours, **others}, "warm engines", "requests in time, %")
    return {"burst": made}
