"""NetKV experiment 4 (VI-F, Fig. 2): the oracle refreshed every 0.1 to 60 s.

Without other traffic congestion is 0, so a stale oracle does no harm, and the line is flat, as in the paper. The rows
"switching" add background traffic that takes 40 % of a link for about 5 s and then nothing for about 5 s, independently
on each link. docs/results.md has the gain over CLA* at each period, with its interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.netkv_common import WINDOWS, named, reduction, run_one

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV experiment 4: oracle refresh every 0.1 to 60 s, RAG at 100 % load, quiet and with switching background"
SEEDS = (WINDOWS, 2)
PERIODS_S = (0.1, 1.0, 10.0, 60.0)
BACKGROUNDS = {"quiet": 0.0, "switching": 0.4}
PAPER = -11.0  # per cent vs CLA*, at every interval


def variants(quick: bool) -> list[Variant]:
    made = []
    for label, share in BACKGROUNDS.items():
        made += [named("rag", s, label, switching=share, windows=WINDOWS) for s in ("CLA*", "NetKV-Static")]
        periods = (0.1, 60.0) if quick else PERIODS_S
        made += [
            named("rag", "NetKV-Full", label, f"{p:g}s", switching=share, oracle_s=p, windows=WINDOWS)
            for p in periods
        ]
    return made


def _periods(results: Results) -> list[float]:
    return [p for p in PERIODS_S if f"rag quiet {p:g}s NetKV-Full" in results.runs]


def compare(results: Results) -> list[Row]:
    rows = []
    for label in BACKGROUNDS:
        base, periods = f"rag {label} CLA*", _periods(results)
        names = [f"rag {label} {p:g}s NetKV-Full" for p in periods]
        for name, period in zip(names, periods, strict=True):
            paper = PAPER if label == "quiet" else None
            rows.append(
                reduction(results, f"{label}, refreshed every {period:g} s, vs CLA*", base, name, paper)
            )
        means = [results.mean(name, "ttft_mean_s") for name in names]
        spread = 100.0 * (max(means) / min(means) - 1.0)
        met = spread <= 1.0
        rows.append(
            Row(f"{label}: longest over shortest mean TTFT", 0.0, spread, "%", None, "within 1 point", met)
        )
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    made, [axes] = look.figure()
    periods, series = _periods(results), {}
    for label in BACKGROUNDS:
        found = [results.spread(f"rag {label} {p:g}s NetKV-Full", "ttft_mean_s") for p in periods]
        series[f"NetKV-Full, {label}"] = look.Series(
            periods, [f.mean for f in found], [f.half_width for f in found]
        )
        base = results.mean(f"rag {label} CLA*", "ttft_mean_s")
        series[f"CLA*, {label}"] = look.Series(periods, [base] * len(periods), quiet=True)
    look.lines(axes, series, "oracle refreshed every, s", "mean TTFT, s", log_x=True)
    return {"netkv_staleness": made}
