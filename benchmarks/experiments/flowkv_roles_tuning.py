"""The thresholds of FlowKV's role switch, tuned on seeds that `flowkv_roles` does not measure.

Load and engines are those of `flowkv_roles`. The paper prints no thresholds. Both forms of the judgement get the same
search, over 16 points each: four values of `prefill_low`, two of `decode_low`, and two of `decode_high`, the greater of
which is out of reach of engines without queues. `prefill_low` and `prefill_high` are in the units of a form's scores.

The rule, which was written down before the first run: `flowkv_roles.THRESHOLDS` has for each form the point with the
greatest mean share of requests within both SLOs, of several such the first.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from benchmarks.experiments import flowkv_roles as measured
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant
from policies.routing.flowkv.regimes import RegimeThresholds
from policies.routing.flowkv.role_switch import PAPER, WORK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "FlowKV 3.4, the thresholds of both forms of the role switch tuned on other seeds; synthetic requests"
)
SEEDS = (4, 1)
FIRST_SEED = 100
SWITCH_S = 10.0
PREFILL_LOWS = {PAPER: (0.01, 0.02, 0.05, 0.1), WORK: (0.001, 0.003, 0.006, 0.012)}
PREFILL_HIGH = {PAPER: 0.6, WORK: 0.1}
DECODE_LOWS, DECODE_HIGHS = (0.2, 0.3), (0.4, 0.9)
IDLE = 0.12
SHARE = "slo_share"


def points(judge: str) -> list[RegimeThresholds]:
    """Returns the thresholds that are tried for one form of the judgement."""
    return [
        RegimeThresholds(prefill, PREFILL_HIGH[judge], low, high, IDLE)
        for prefill, low, high in product(PREFILL_LOWS[judge], DECODE_LOWS, DECODE_HIGHS)
    ]


def variants(quick: bool) -> list[Variant]:
    base: dict[str, Any] = {"period_s": measured.PERIODS_S[0], "periods": 2 if quick else 3}
    return [
        Variant(_name(judge, at), base | measured.switched(judge, SWITCH_S, at))
        for judge in (PAPER, WORK)
        for at in points(judge)[:: 5 if quick else 1]
    ]


def _name(judge: str, at: RegimeThresholds) -> str:
    return f"{judge}, prefill_low {at.prefill_low:g}, decode {at.decode_low:g} to {at.decode_high:g}"


def run_one(config: Config, seed: int) -> Metrics:
    return measured.run_one(config, FIRST_SEED + seed)


def compare(results: Results) -> list[Row]:
    rows = []
    for judge in (PAPER, WORK):
        tried = {_name(judge, at): at for at in points(judge) if _name(judge, at) in results.runs}
        best = max(tried, key=lambda name: results.mean(name, SHARE))
        used = measured.THRESHOLDS[judge]
        aim = f"that of {_name(judge, used)}, which flowkv_roles has"
        met = tried[best] == used if len(tried) == len(points(judge)) else None
        share = 100.0 * results.mean(best, SHARE)
        rows.append(Row(f"{judge}: the greatest share", None, share, "%", None, aim, met, best))
    for name in results.variants:
        seen = results.spread(name, SHARE)
        width = None if seen.half_width is None else 100.0 * seen.half_width
        rows.append(Row(f"{name}: requests within both SLOs", None, 100.0 * seen.mean, "%", width))
    return rows


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    made, axes = look.figure(columns=2)
    for axis, judge in zip(axes, (PAPER, WORK), strict=True):
        names = [name for name in results.variants if name.startswith(judge)]
        seen = {name: results.spread(name, SHARE) for name in names}
        values = {
            name.partition(", ")[2]: (100.0 * s.mean, None if s.half_width is None else 100.0 * s.half_width)
            for name, s in seen.items()
        }
        look.bars(axis, values, "requests within both SLOs, %", judge)
    return {"flowkv_roles_tuning": made}
