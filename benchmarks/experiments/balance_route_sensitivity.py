"""BalanceRoute 6.4 and appendix H: BR-H with the oracle over its parameters, G = 8.

The paper varies one parameter at a time around its default: H in {1, 24, 48, 96}, and a second one in {0.5, 0.7, 0.9,
1.0}, whose label the text has lost; it looks like gamma. This experiment varies both with the paper's own rule ("br_h"
in Table 1), and also the predictor's gate and refresh. Beyond the paper, it adds our changes to the pool to the paper's
aim, and varies our aim at the mean, with its beta, ageing and pool_lag, our aim with the paper's projection, and the
size of the pool. The trace is Table 1's `recurring-long`. The committed results have four seeds, and runs are shorter
than Table 1's, so differences within the intervals say nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import plots as look
from benchmarks.experiments import balance_route_cluster as cluster
from benchmarks.experiments.balance_route_table1 import SAME, figures
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "BalanceRoute sensitivity (Table 6 and beyond): H, gamma, gate, aiming at the mean, beta, ageing, pool; synthetic "
    "long contexts"
)
SEEDS = (1, 1)
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
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, beta 2": {"beta": 2.0},
    "ours, beta 4": {"beta": 4.0},
    "ours, beta 8": {"beta": 8.0},
    "ours, no ageing": {"ageing_s": None},
    "ours, singles of the window": {"pool_wide": False},
    "ours, no pool_lag": {"pool_lag": 0.0},
    "ours, the paper's projection": {"refill": False},
}
POOLS = (4.0, 32.0)


def variants(quick: bool) -> list[Variant]:
    printed = f"{cluster.PRINTED} oracle"
    made = [_variant(f"H {h}, gamma {g}", printed, quick, horizon=h, gamma=g) for h, g in PAPER]
    if quick:
        return made
    deployed = _config("br_h lightgbm", quick)
    made += [Variant("gate 0.25, lightgbm", deployed | {"gate": 0.25})]
    made += [Variant("refresh 4, lightgbm", deployed | {"refresh_tokens": 4})]
    with_ours = {"pool_lag": 1.0, "ageing_s": 600.0, "pool_wide": True}
    made += [_variant("the paper's aim, our pool", "br_h oracle", quick, **with_ours)]
    made += [_variant(name, "ours oracle", quick, **params) for name, params in OURS.items()]
    ours = _config("ours oracle", quick)
    return made + [Variant(f"ours, pool {pool:g}", ours | {"pool": pool}) for pool in POOLS]


def _variant(name: str, method: str, quick: bool, **params: Any) -> Variant:
    return Variant(name, _config(method, quick, **params))


def _config(method: str, quick: bool, **params: Any) -> dict[str, Any]:
    """Returns the config of a run that is shorter than Table 1's, because there are many runs."""
    config = cluster.config_of(CASE, method, 8, quick, **params)
    return config if quick else config | {"warmup_steps": 5_000, "steps": 8_000}


def run_one(config: Config, seed: int) -> Metrics:
    return cluster.run_one(config, seed)


def compare(results: Results) -> list[Row]:
    papers = {f"H {h}, gamma {g}": paper for (h, g), paper in PAPER.items()}
    rows = []
    for name in results.variants:
        rows += figures(results, name, name, papers.get(name))
    return rows


def plots(results: Results) -> dict[str, Figure]:
    made, axes = look.figure(columns=2, height=5.0)
    for panel, metric, label in (
        (axes[0], "imbalance_tokens", "mean of max - min, KV tokens"),
        (axes[1], SAME, "output tokens/s at the same load"),
    ):
        seen = {name: results.spread(name, metric) for name in results.variants}
        look.bars(panel, {name: (s.mean, s.half_width) for name, s in seen.items()}, label)
    return {"balance_route_sensitivity": made}
