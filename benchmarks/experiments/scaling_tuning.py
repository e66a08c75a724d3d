"""The parameters of every scaling policy, searched alike on the day of `scaling_diurnal` with seeds of its own.

Each policy has a grid around its published or default values, of about the same size as ours. The best point has the
least cost: engine time, and 2 % of it more for each tenth of a percentage point of attainment below 99 %. That puts 1 %
of late requests at a fifth of the fleet, so a policy is not chosen for saving engines by being late. Delays of minutes
are in the grids because the day is compressed. `scaling_tuned` has the points in use; this experiment shows whether
they are the best. It has not been run yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant
from benchmarks.experiments.scaling_common import OURS, RIVALS, TUNING_SEED
from benchmarks.experiments.scaling_diurnal import FORESEEN
from benchmarks.experiments.scaling_diurnal import run_one as run_day
from benchmarks.experiments.scaling_tuned import FORESEEN_HEADROOM, TUNED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "the parameters of all scaling policies, by the same search on seeds that no other experiment uses"
SEEDS = (1, 1)
ENOUGH, PER_POINT = 0.99, 20.0
_FORECAST = {"level_gain": 0.15, "trend_gain": 0.1, "damping": 0.9}
_OURS = {"calm_s": 30.0, "cool_down_s": 15.0, "band": 0.0, "headroom_most": 0.0, "forecast": _FORECAST}
_LESS = {"share": 0.95, "deviations": 1.0}


def _ongoing(prefill: float, decode: float, down_s: float) -> Mapping[str, Any]:
    return {
        "target_ongoing": prefill,
        "decode_target": decode,
        "upscale_delay_s": 10.0,
        "downscale_delay_s": down_s,
    }


def _regimes(prefill: tuple[float, float], decode: tuple[float, float], idle: float) -> Mapping[str, Any]:
    thresholds = {
        "prefill_low": prefill[0],
        "prefill_high": prefill[1],
        "decode_low": decode[0],
        "decode_high": decode[1],
        "idle": idle,
    }
    return {"thresholds": thresholds, "low_load": 0.1, "low_after_s": 60.0, "change_s": 20.0}


GRIDS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    OURS: (
        {"calm_s": 60.0, "cool_down_s": 30.0},
        {**_OURS, "quantile": 0.6, "warm_quantile": 0.6},
        {**_OURS, "quantile": 0.5, "warm_quantile": 0.8, "margins": _LESS},
        {**_OURS, "quantile": 0.5, "warm_quantile": 0.6, "margins": _LESS},
    ),
    "ongoing": (
        _ongoing(1.5, 12.0, 60.0),
        _ongoing(1.0, 10.0, 60.0),
        _ongoing(0.7, 8.0, 60.0),
        _ongoing(0.7, 8.0, 300.0),
    ),
    "latency_ratio": (
        {},
        {"stabilise_s": 60.0, "mean_s": 15.0},
        {"stabilise_s": 120.0, "tolerance": 0.3},
        {"stabilise_s": 300.0, "mean_s": 15.0},
    ),
    "demand_rate": (
        {},
        {"interval_s": 60.0},
        {"interval_s": 30.0},
        {"interval_s": 30.0, "kv_high": 0.5, "kv_low": 0.2},
    ),
    "regime_rule": (
        _regimes((0.01, 0.02), (0.3, 0.5), 0.05),
        _regimes((0.02, 0.05), (0.3, 0.5), 0.05),
        _regimes((0.005, 0.01), (0.2, 0.4), 0.02),
        _regimes((0.5, 0.9), (0.5, 0.9), 0.2),
    ),
    FORESEEN: ({"headroom": -0.15}, {"headroom": -0.08}, {"headroom": 0.0}),
}


def _name(policy: str, at: int) -> str:
    return f"{policy} {at}"


def variants(quick: bool) -> list[Variant]:
    return [
        Variant(_name(policy, i), {"policy": policy, "params": params})
        for policy, grid in GRIDS.items()
        for i, params in enumerate(grid[:2] if quick else grid)
    ]


def run_one(config: Config, seed: int) -> Metrics:
    return run_day(config, TUNING_SEED + seed)


def cost(results: Results, name: str) -> float:
    """Returns engine time in hours, more where fewer than 99 % are in time."""
    lacking = max(0.0, ENOUGH - results.mean(name, "slo_share"))
    return results.mean(name, "fleet/engine_s") / 3_600.0 * (1.0 + PER_POINT * lacking)


def compare(results: Results) -> list[Row]:
    rows = []
    for policy in (OURS, *RIVALS, FORESEEN):
        names = [name for name, c in results.variants.items() if c["policy"] == policy]
        best = min(names, key=lambda name: (cost(results, name), name))
        used = {"headroom": FORESEEN_HEADROOM} if policy == FORESEEN else dict(TUNED[policy])
        met = dict(results.variants[best]["params"]) == used
        share = 100.0 * results.mean(best, "slo_share")
        note = f"{share:.2f} % in time; {results.variants[best]['params']}"
        rows.append(
            Row(f"{best}: cost of the best point", None, cost(results, best), "h", None, "is used", met, note)
        )
        for name in names:
            rows.append(Row(f"{name}: cost", None, cost(results, name), "h"))
    return rows


def plots(results: Results) -> dict[str, Figure]:
    return {}
