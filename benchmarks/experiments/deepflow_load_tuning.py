"""The load correction k (ours) of PD-aware and combined scheduling for `deepflow_load`, on the first half of the trace.

Engines, maps and forecasts are those of `deepflow_load`, which measures on the second half and on other seeds; k = 0 is
the paper's own policy. The rule was written down before the first run: of all k, the best has the least sum, over both
policies and all rates, of mean JCT / least mean JCT of any k at that rate under that policy. `deepflow_load.OURS`
is to be within 1 % of the best by the mean of these ratios; where it is not, it becomes the best before `deepflow_load`
is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.experiments import deepflow_load as measured
from benchmarks.experiments import deepflow_setup as setup
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = (
    "DeepFlow Figure 6 from idle to overload, the load correction k tuned on the first half of the code trace"
)
SEEDS = (6, 1)
SEEDS_FROM = 700
POLICIES = ("PD-aware", "combined")
CORRECTIONS = (0.0, 10.0, 30.0, 100.0, 300.0, 1_000.0)
RATES = (1.0, 4.0, 8.0, 12.0, 16.0)
QUICK_CORRECTIONS, QUICK_RATES = (0.0, 100.0), (8.0, 16.0)
WITHIN = 1.01


def variants(quick: bool) -> list[Variant]:
    corrections, rates = (QUICK_CORRECTIONS, QUICK_RATES) if quick else (CORRECTIONS, RATES)
    return [
        Variant(
            _name(policy, k, rate),
            measured.config_of(policy, rate, measured.PRACTICE, quick, setup.TUNED)
            | {"params": {"load_correction": k}},
        )
        for policy in POLICIES
        for rate in rates
        for k in corrections
    ]


def _name(policy: str, k: float, rate: float) -> str:
    return f"{policy}, k = {k:g}, {rate:g}/s"


def run_one(config: Config, seed: int) -> Metrics:
    return measured.run_one(config, seed)


def compare(results: Results) -> list[Row]:
    rates = sorted({config["rate_per_s"] for config in results.variants.values()})
    corrections = sorted({config["params"]["load_correction"] for config in results.variants.values()})
    means = regrets(results, rates, corrections)
    best, used = min(means, key=means.__getitem__), measured.OURS["load_correction"]
    over = means[used] / means[best]
    row = Row(
        "k in use: mean of JCT / least JCT, over that of the best k", None, over, note=f"best: {best:g}"
    )
    rows = [aimed(row, f"<= {WITHIN:g}", most=WITHIN)]
    rows += [Row(f"k = {k:g}: mean of JCT / least JCT", None, means[k]) for k in corrections]
    for name in results.variants:
        seen = results.spread(name, measured.JCT)
        rows.append(Row(f"{name}: mean JCT", None, seen.mean, "s", seen.half_width))
    return rows


def regrets(results: Results, rates: Sequence[float], corrections: Sequence[float]) -> dict[float, float]:
    """Returns for each k the mean over policies and rates of its mean JCT / the least mean JCT of any k there."""
    ratios: dict[float, list[float]] = {k: [] for k in corrections}
    for policy in POLICIES:
        for rate in rates:
            means = {k: results.mean(_name(policy, k, rate), measured.JCT) for k in corrections}
            for k, mean in means.items():
                ratios[k].append(mean / min(means.values()))
    return {k: sum(of) / len(of) for k, of in ratios.items()}


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    rates = sorted({config["rate_per_s"] for config in results.variants.values()})
    corrections = sorted({config["params"]["load_correction"] for config in results.variants.values()})
    made, axes = look.figure(columns=len(POLICIES))
    for axis, policy in zip(axes, POLICIES, strict=True):
        series = {}
        for k in corrections:
            seen = [results.spread(_name(policy, k, rate), measured.JCT) for rate in rates]
            series[f"k = {k:g}"] = look.Series(rates, [s.mean for s in seen], [s.half_width for s in seen])
        look.lines(axis, series, "requests/s", "JCT, s", policy)
    return {"deepflow_load_tuning": made}
