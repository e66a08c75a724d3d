"""The parameters of the composition, of its parts and of the static stack, tuned alike for `composition`.

Each policy has a grid of about the same size (`GRIDS`), around its defaults: the points of NetKV are rungs of its
ladder, queue terms and bounds of the transfers that count; those of BR-H and of the static stack are ages and our aims
of `balance_route_cluster`; those of BR-0 ages, windows and where the single best is sought; those of CLA the weights of
cache and load, with both pairs that NetKV tuned (VI-A). The join of the shortest queue has no parameter. Cells, cluster
and forecasts are those of `composition`; seeds are those of 100 and above, on which it does not measure.

The rule, which was written down before the first run: `composition.TUNED` has for each policy the point with the least
sum over all cells of mean TTFT / least mean TTFT of any of its points there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import composition
from benchmarks.experiments.balance_route_cluster import AIM
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "the composition, its parts and the static stack tuned alike, on seeds of their own; synthetic requests"
)
SEEDS = (3, 1)
FIRST_SEED = 100
CELLS = ("9K 4:1 heavy barrier", "4K 4:1 light barrier")
TTFT = composition.TTFT

Point = Mapping[str, Any]
AGES: tuple[Point, ...] = ({}, {"ageing_s": 60.0}, {"ageing_s": None})
WIDE: Point = {"pool_wide": True}
BALANCED = tuple({**age, **aim} for age, aim in itertools.product(AGES, ({}, WIDE, AIM)))
GRIDS: Mapping[str, tuple[Point, ...]] = {
    "NetKV": (
        *({}, {"max_inflight": 4}, {"max_inflight": 64}, {"variant": "topo_only"}),
        *({"queue": "iterations", **more} for more in ({}, {"max_inflight": 4}, {"max_inflight": 64})),
        {"queue": "iterations", "variant": "topo_only"},
    ),
    "BR-H": BALANCED,
    "BR-0": (*({**age, **aim} for age in AGES for aim in ({}, WIDE)), {"window": 4}, {"window": 8}),
    "CLA": tuple(
        {"cache_weight": cache, "load_weight": load} if (cache, load) != (1.0, 1.0) else {}
        for cache, load in (
            *((1.0, 1.0), (1.5, 0.7), (0.5, 1.0), (2.0, 1.0)),
            *((4.0, 1.0), (1.0, 2.0), (1.0, 4.0), (0.0, 1.0)),
        )
    ),
    "static stack": BALANCED,
    "composition": (
        *({}, {"hold_steps": 100.0}, {"hold_steps": 1_000.0}, {"ageing_s": 0.3}, {"ageing_s": 3.0}),
        *({"near_scarcity": 1.0}, {"scarcity": 2.0}, {"stream_weight": 0.1}, {"window": 12}),
    ),
}


def variants(quick: bool) -> list[Variant]:
    chosen = {name: config for name, config in composition.cells(quick).items() if name.startswith(CELLS)}
    return [
        Variant(_name(cell, policy, point), {**config, **_policy(policy, point), "point": dict(point)})
        for cell, config in chosen.items()
        for policy, grid in GRIDS.items()
        for point in (grid[:2] if quick else grid)
    ]


def _name(cell: str, policy: str, point: Point) -> str:
    return f"{cell} {policy} {json.dumps(dict(point))}"


def _policy(policy: str, point: Point) -> dict[str, Any]:
    """Returns the entries of a config that select a policy at a point of its grid, whatever point is in use."""
    chosen = composition.policy_config(policy)
    params = {k: v for k, v in chosen["params"].items() if k not in composition.TUNED[policy]}
    return {**chosen, "params": {**params, **point}}


def run_one(config: Config, seed: int) -> Metrics:
    return composition.run_one(config, FIRST_SEED + seed)


def compare(results: Results) -> list[Row]:
    rows: list[Row] = []
    for policy, grid in GRIDS.items():
        points = [point for point in grid if _cells(results, policy, point)]
        sums = regrets(results, policy, points)
        best = min(range(len(points)), key=lambda i: sums[i])
        used = composition.TUNED[policy]
        above, met = None, None
        if len(points) == len(grid) and used in points:
            above, met = 100.0 * (sums[points.index(used)] / sums[best] - 1.0), points[best] == used
        note = f"best: {_shown(points[best])}, in use: {_shown(used)}"
        rows.append(
            Row(f"{policy}: TTFT of the point in use against the best", None, above, "%",
                aim="the best is in use", met=met, note=note)
        )  # fmt: skip
        cells = len(_cells(results, policy, points[0]))
        rows += [
            Row(f"{policy}, {_shown(point)}: mean of TTFT / least TTFT", None, total / cells)
            for point, total in zip(points, sums, strict=True)
        ]
    return rows


def _shown(point: Point) -> str:
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in point.items()) or "defaults"


def _cells(results: Results, policy: str, point: Point) -> list[str]:
    """Returns the cells in which a policy was run at a point."""
    return [c["cell"] for c in results.variants.values() if c["label"] == policy and c["point"] == point]


def regrets(results: Results, policy: str, points: Sequence[Point]) -> list[float]:
    """Returns for each point the sum over the cells of its mean TTFT / the least mean TTFT of any point there."""
    sums = [0.0] * len(points)
    for cell in _cells(results, policy, points[0]):
        means = [results.mean(_name(cell, policy, point), TTFT) for point in points]
        sums = [total + mean / min(means) for total, mean in zip(sums, means, strict=True)]
    return sums


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    made, axes = look.figure(columns=2, rows=(len(GRIDS) + 1) // 2, width=6.0)
    for axis, (policy, grid) in zip(axes, GRIDS.items(), strict=True):
        points = [point for point in grid if _cells(results, policy, point)]
        cells = len(_cells(results, policy, points[0]))
        sums = regrets(results, policy, points)
        values: dict[str, tuple[float, float | None]] = {
            _shown(point): (total / cells, None) for point, total in zip(points, sums, strict=True)
        }
        look.bars(axis, values, "mean TTFT / least mean TTFT", policy)
    return {"composition_tuning": made}
