"""DeepFlow 5.2: locality-aware scheduling on and off, by how much prompts share.

Two pairs of policies differ by locality alone: `load_aware` and `locality`, which choose among all engines, and
PD-aware and combined scheduling (both with our load correction), which choose a kind of engine first (Algorithm 1).
Engines, maps and requests are those of `deepflow_load`. The trace does not say what its prompts share, so the share of
those that begin with one of 32 texts is varied. It is never none: without a hit the policies of a pair decide alike, so
that no row could fail.

The paper prints no figures. Its words are the aim: locality "maximizes KV cache reuse", so where prompts share, there
are more hits with it than without. Our own aim is that it makes no JCT more than 1 % longer, at any rate and share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.experiments import deepflow_load as load
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.seeds import spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "DeepFlow 5.2: locality on and off, by the share of prompts that begin alike"
SEEDS = (32, 1)
SEEDS_FROM = 640
PAIRS = {"all engines": ("LA", "locality"), "within a kind": ("PD-aware", "combined")}
"""The policies without and with locality, by where they choose."""
SHARES = (0.2, 0.5, 0.9)
RATES = (0.5, 4.0, 10.0)
QUICK_SHARES, QUICK_RATES = (0.2, 0.9), (4.0,)
HITS = "prefill_hit_share"
MOST_LONGER_PERCENT = 1.0


def variants(quick: bool) -> list[Variant]:
    shares, rates = (QUICK_SHARES, QUICK_RATES) if quick else (SHARES, RATES)
    return [
        Variant(_name(policy, share, rate), _config(policy, share, rate, quick))
        for pair in PAIRS.values()
        for share in shares
        for rate in rates
        for policy in pair
    ]


def _name(policy: str, share: float, rate: float) -> str:
    return f"{policy}, sharing {share:g}, {rate:g}/s"


def _config(policy: str, share: float, rate: float, quick: bool) -> dict[str, Any]:
    return load.config_of(policy, rate, load.PRACTICE, quick) | {"p_share": share}


def run_one(config: Config, seed: int) -> Metrics:
    return load.run_one(config, seed)


def compare(results: Results) -> list[Row]:
    cells = dict.fromkeys((config["p_share"], config["rate_per_s"]) for config in results.variants.values())
    rows = []
    for where, (off, on) in PAIRS.items():
        for share, rate in cells:
            without, with_hits = _name(off, share, rate), _name(on, share, rate)
            name = f"{where}, sharing {share:g}, {rate:g}/s"
            pairs = zip(results.values(without, HITS), results.values(with_hits, HITS), strict=True)
            more = spread([100.0 * (b - a) for a, b in pairs])
            row = Row(f"{name}: prefix hits, on less off", None, more.mean, "points", more.half_width)
            rows.append(aimed(row, "> 0", above=0.0))
            less, half = results.reduction_percent(without, with_hits, load.JCT)
            row = Row(f"{name}: JCT below that without locality", None, less, "%", half)
            rows.append(aimed(row, f">= -{MOST_LONGER_PERCENT:g}", least=-MOST_LONGER_PERCENT))
    return rows


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    shares = sorted({config["p_share"] for config in results.variants.values()})
    rates = sorted({config["rate_per_s"] for config in results.variants.values()})
    made, axes = look.figure(columns=len(rates))
    for axis, rate in zip(axes, rates, strict=True):
        series = {}
        for where, (off, on) in PAIRS.items():
            seen = [
                results.reduction_percent(_name(off, s, rate), _name(on, s, rate), load.JCT) for s in shares
            ]
            series[where] = look.Series(shares, [mean for mean, _ in seen], [half for _, half in seen])
        look.lines(axis, series, "share of prompts", "JCT below that without locality, %", f"{rate:g}/s")
    return {"deepflow_locality": made}
