"""BalanceRoute 6.4 and appendix H: BR-H with the oracle over its parameters, G = 8.

The paper sweeps a cross around its default: H in {1, 24, 48, 96} and a second parameter in {0.5, 0.7, 0.9, 1.0}, whose
label the text has lost; it looks like gamma. Here both, and beyond the paper: beta, the predictor's gate and refresh,
and how much the pool holds. The trace is Table 1's `recurring-long`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import plots as look
from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments.balance_route_table1 import FIGURES, figure_name
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "BalanceRoute sensitivity (Table 6 and beyond): H, gamma, beta, gate, refresh, pool"
SEEDS = (2, 1)
CASE = "recurring-long"

# Table 6 (G = 8): (H, gamma) -> imbalance in tokens, TPOT P95 in ms, throughput in tok/s
PAPER = {
    (1, 0.9): (32_304, 78.120, 986.41),
    (24, 0.9): (24_706, 77.933, 1_022.67),
    (48, 0.9): (25_608, 77.517, 1_042.61),
    (96, 0.9): (31_862, 79.460, 945.41),
    (48, 0.5): (28_327, 78.040, 1_024.04),
    (48, 0.7): (26_599, 77.611, 1_020.78),
    (48, 1.0): (29_318, 77.310, 1_026.77),
}
BETAS = (1.0, 2.0, 4.0, 16.0, 64.0)
POOLS = (4.0, 16.0, 64.0)
GATES = (0.25, 0.75)
REFRESHES = (4, 64)


def variants(quick: bool) -> list[Variant]:
    made = [_variant(f"H {h}, gamma {g}", quick, horizon=h, gamma=g) for h, g in PAPER]
    if quick:
        return made
    made += [_variant(f"beta {b:g}", quick, beta=b) for b in BETAS]
    for pool in POOLS:
        for method in ("br_0", "br_h oracle"):
            config = cluster.config_of(CASE, method, 8, quick) | {"pool": pool}
            made.append(Variant(f"pool {pool:g}, {method}", config))
    deployed = cluster.config_of(CASE, "br_h lightgbm", 8, quick)
    made += [Variant(f"gate {gate:g}, lightgbm", deployed | {"gate": gate}) for gate in GATES]
    made += [Variant(f"refresh {k}, lightgbm", deployed | {"refresh_tokens": k}) for k in REFRESHES]
    return made


def _variant(name: str, quick: bool, **params: Any) -> Variant:
    return Variant(name, cluster.config_of(CASE, "br_h oracle", 8, quick, **params))


def run_one(config: Config, seed: int) -> Metrics:
    return cluster.run_one(config, seed)


def compare(results: Results) -> list[Row]:
    papers = {f"H {h}, gamma {g}": figures for (h, g), figures in PAPER.items()}
    rows = []
    for name in results.variants:
        for i, (metric, unit) in enumerate(FIGURES):
            seen = results.spread(name, metric)
            paper = papers[name][i] if name in papers else None
            rows.append(Row(f"{name}: {figure_name(metric)}", paper, seen.mean, unit, seen.half_width))
    return rows


def plots(results: Results) -> dict[str, Figure]:
    made, axes = look.figure(columns=2, height=5.0)
    for panel, metric, label in (
        (axes[0], "imbalance_tokens", "mean of max - min, KV tokens"),
        (axes[1], "throughput_same_load_tok_s", "output tokens/s"),
    ):
        seen = {name: results.spread(name, metric) for name in results.variants}
        look.bars(panel, {name: (s.mean, s.half_width) for name, s in seen.items()}, label)
    return {"balance_route_sensitivity": made}
