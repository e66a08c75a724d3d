"""The load correction k of DeepFlow's PD-aware and combined policies (ours), tuned on the first half of the code trace.

The engines, rates and forecasts are those of `deepflow_scheduling`, which measures on the second half and on other
seeds. k = 0 is the paper's own policy.

The rule, which was written down before the first run: `deepflow_scheduling.OURS` has the k with the least sum, over
both policies and all rates, of mean JCT / least mean JCT of any k at that rate under that policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.experiments import deepflow_scheduling as measured
from benchmarks.experiments import deepflow_setup as setup
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "DeepFlow Figure 6, the load correction k tuned on the first half of the code trace"
SEEDS = (4, 1)
FIRST_SEED = 100
POLICIES = ("PD-aware", "combined")
CORRECTIONS = (0.0, 30.0, 100.0, 300.0, 1_000.0, 3_000.0)
JCT = "jct_mean_s"


def variants(quick: bool) -> list[Variant]:
    corrections = CORRECTIONS[2:4] if quick else CORRECTIONS
    return [
        Variant(
            _name(one.config["policy"], k, one.config["rate_per_s"]),
            {**one.config, "params": {"load_correction": k}, "part": setup.TUNED},
        )
        for one in measured.variants(quick)
        if one.config["policy"] in POLICIES and one.config["accuracy"] == measured.PRACTICE
        for k in corrections
    ]


def _name(policy: str, k: float, rate: float) -> str:
    return f"{policy}, k = {k:g}, {rate:g}/s"


def run_one(config: Config, seed: int) -> Metrics:
    return measured.run_one(config, FIRST_SEED + seed)


def compare(results: Results) -> list[Row]:
    rates, corrections = _rates(results), _corrections(results)
    sums = regrets(results, rates, corrections)
    best, used = min(sums, key=lambda k: sums[k]), measured.OURS["load_correction"]
    whole = len(corrections) == len(CORRECTIONS)
    aim, met = (f"{used:g}, which deepflow_scheduling has", best == used) if whole else ("", None)
    rows = [Row("k of least mean JCT", None, best, aim=aim, met=met)]
    rows += [
        Row(f"k = {k:g}: mean of JCT / least JCT", None, sums[k] / (2 * len(rates))) for k in corrections
    ]
    for name in results.variants:
        seen = results.spread(name, JCT)
        rows.append(Row(f"{name}: mean JCT", None, seen.mean, "s", seen.half_width))
    return rows


def _rates(results: Results) -> list[float]:
    return sorted({config["rate_per_s"] for config in results.variants.values()})


def _corrections(results: Results) -> list[float]:
    return sorted({config["params"]["load_correction"] for config in results.variants.values()})


def regrets(results: Results, rates: Sequence[float], corrections: Sequence[float]) -> dict[float, float]:
    """Returns for each k the sum over policies and rates of its mean JCT / the least mean JCT of any k there."""
    sums = dict.fromkeys(corrections, 0.0)
    for policy in POLICIES:
        for rate in rates:
            means = {k: results.mean(_name(policy, k, rate), JCT) for k in corrections}
            for k, mean in means.items():
                sums[k] += mean / min(means.values())
    return sums


def plots(results: Results) -> dict[str, Figure]:
    from benchmarks import plots as look

    rates = _rates(results)
    made, axes = look.figure(columns=len(POLICIES))
    for axis, policy in zip(axes, POLICIES, strict=True):
        series = {}
        for k in _corrections(results):
            seen = [results.spread(_name(policy, k, rate), JCT) for rate in rates]
            series[f"k = {k:g}"] = look.Series(rates, [s.mean for s in seen], [s.half_width for s in seen])
        look.lines(axis, series, "requests/s", "JCT, s", policy)
    return {"deepflow_tuning": made}
