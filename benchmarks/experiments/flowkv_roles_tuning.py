"""The thresholds of FlowKV's role switch, tuned on seeds that `flowkv_roles` does not measure.

Load and engines are those of `flowkv_roles`. The paper prints no thresholds. The search has 16 points: four values of
`prefill_low`, two of `decode_low`, and two of `decode_high`, the greater of which is out of reach of engines without
queues.

The rule, which was written down before the first run: `flowkv_roles.THRESHOLDS` is the point with the greatest mean
share of requests within both SLOs, of several such the first.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import flowkv_roles as measured
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant
from policies.routing.flowkv.regimes import RegimeThresholds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "FlowKV 3.4, the thresholds of the role switch tuned on other seeds; synthetic requests"
SEEDS = (4, 1)
FIRST_SEED = 100
SWITCH_S = 10.0
PREFILL_LOWS, PREFILL_HIGH = (0.01, 0.02, 0.05, 0.1), 0.6
DECODE_LOWS, DECODE_HIGHS = (0.2, 0.3), (0.4, 0.9)
IDLE = 0.12
SHARE = "slo_share"


def points() -> list[RegimeThresholds]:
    """Returns the thresholds that are tried."""
    return [
        RegimeThresholds(prefill, PREFILL_HIGH, low, high, IDLE)
        for prefill, low, high in product(PREFILL_LOWS, DECODE_LOWS, DECODE_HIGHS)
    ]


def variants(quick: bool) -> list[Variant]:
    base: dict[str, Any] = {"period_s": measured.PERIODS_S[0], "periods": 2 if quick else 3}
    return [
        Variant(_name(at), base | measured.switched(SWITCH_S, at)) for at in points()[:: 5 if quick else 1]
    ]


def _name(at: RegimeThresholds) -> str:
    return f"prefill_low {at.prefill_low:g}, decode {at.decode_low:g} to {at.decode_high:g}"


def run_one(config: Config, seed: int) -> Metrics:
    return measured.run_one(config, FIRST_SEED + seed)


def compare(results: Results) -> list[Row]:
    tried = {_name(at): at for at in points() if _name(at) in results.runs}
    best = max(tried, key=lambda name: results.mean(name, SHARE))
    aim = f"that of {_name(measured.THRESHOLDS)}, which flowkv_roles has"
    met = tried[best] == measured.THRESHOLDS if len(tried) == len(points()) else None
    share = 100.0 * results.mean(best, SHARE)
    rows = [Row("the greatest share", None, share, "%", None, aim, met, best)]
    for name in results.variants:
        seen = results.spread(name, SHARE)
        width = None if seen.half_width is None else 100.0 * seen.half_width
        rows.append(Row(f"{name}: requests within both SLOs", None, 100.0 * seen.mean, "%", width))
    return rows


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    made, (axis,) = look.figure(columns=1)
    values = {}
    for name in results.variants:
        seen = results.spread(name, SHARE)
        values[name] = (100.0 * seen.mean, None if seen.half_width is None else 100.0 * seen.half_width)
    look.bars(axis, values, "requests within both SLOs, %", f"loans of {SWITCH_S:g} s")
    return {"flowkv_roles_tuning": made}
