"""NetKV experiment 5 (VI-G, Fig. 3): the share of requests that share a prefix, 0 to 0.9.

The gain is as flat as the paper's, and lower (docs/results.md). The paper contradicts itself here: at p_share 0.7, its
experiment 1's point, it gives the same transfers (835 and 620 ms), of which 215 ms are 11.9 % of CLA*'s TTFT (Table II:
-11.8 %), not 15.4; for 15.4 the rest of the TTFT would have to be 560 ms, where Table II has 977.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.netkv_common import WINDOWS, named, reduction, run_one, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV experiment 5: p_share 0 to 0.9, RAG at 100 % load"
SEEDS = (WINDOWS, 2)
SHARES = (0.0, 0.3, 0.5, 0.7, 0.9)
SHOWN = ("CA", "CLA*", "NetKV-Full")
# Per cent: the paper has 15.3 to 15.6 against both, at every p_share.
PAPER = -15.45


def variants(quick: bool) -> list[Variant]:
    return [
        named("rag", scheduler, f"p{p:g}", p_share=p, windows=WINDOWS)
        for p in ((0.0, 0.9) if quick else SHARES)
        for scheduler in SHOWN
    ]


def _shares(results: Results) -> list[float]:
    return [p for p in SHARES if f"rag p{p:g} CA" in results.runs]


def compare(results: Results) -> list[Row]:
    rows = []
    for p in _shares(results):
        at = f"rag p{p:g}"
        for base in ("CA", "CLA*"):
            what = f"p_share {p:g}, NetKV-Full vs {base}"
            rows.append(reduction(results, what, f"{at} {base}", f"{at} NetKV-Full", PAPER))
        name = f"{at} CLA*"
        rows.append(share(results, f"p_share {p:g}, CLA*: prompt tokens hit", name, "decode_hit_share", None))
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    made, [axes] = look.figure()
    series = {}
    for scheduler in SHOWN:
        found = [results.spread(f"rag p{p:g} {scheduler}", "ttft_mean_s") for p in _shares(results)]
        series[scheduler] = look.Series(
            _shares(results), [f.mean for f in found], [f.half_width for f in found]
        )
    look.lines(axes, series, "share of requests with a shared prefix", "mean TTFT, s")
    return {"netkv_prefix": made}
