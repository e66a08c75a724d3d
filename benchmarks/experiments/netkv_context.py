"""NetKV experiment 2 (VI-D, Table III): every RAG prompt made 1K to 64K tokens long, arrivals as they are.

At 1K and 16K the gain over RR agrees. Where we differ by more than 3 points:

- 4K and 8K: transfers and prefill both grow with the length, so the gain over RR is nearly the same from 4K to 16K
  here; the paper's grows by 7 points, and over CLA* from 3 to 18. Its CLA* must hit most of a short prompt's blocks
  and few of a long one's, as if what is shared had a fixed length; p_share alone does not say.
- 32K and 64K: the paper is overloaded from 32K on, whatever the scheduler; this fabric is at 64K (131 GB/s of KV from
  the prefill rack, whose uplinks carry 100), and still drains 65 GB/s at 32K. The same links let it follow the paper
  up to 250 % load at RAG's lengths (49 GB/s), so the paper's source side holds between 49 and 65 GB/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.experiments.base import Results, Row, Variant
from benchmarks.experiments.netkv_common import named, reduction, run_one, share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV experiment 2: prompts of 1K to 64K tokens at 100 % RAG load"
# Table III: tokens -> change of mean TTFT by NetKV-Full in per cent vs RR, vs CLA*
TABLE_3 = {
    1024: (-9.1, -2.2),
    4096: (-13.3, -3.2),
    8192: (-15.2, -10.2),
    16384: (-20.2, -17.6),
    32768: (-6.7, -4.3),
    65536: (0.0, 0.2),
}
SHOWN = ("RR", "CLA*", "NetKV-Full")
SLO_16K = {"RR": 79.1, "NetKV-Full": 99.2}


def variants(quick: bool) -> list[Variant]:
    return [
        named("rag", scheduler, str(tokens), prompt_tokens=tokens)
        for tokens in ((1024, 16384) if quick else TABLE_3)
        for scheduler in SHOWN
    ]


def compare(results: Results) -> list[Row]:
    rows = []
    for tokens, paper in TABLE_3.items():
        at = f"rag {tokens}"
        if f"{at} RR" not in results.runs:
            continue
        for base, theirs in zip(("RR", "CLA*"), paper, strict=True):
            what = f"{tokens} tokens, NetKV-Full vs {base}"
            rows.append(reduction(results, what, f"{at} {base}", f"{at} NetKV-Full", theirs))
    for scheduler, theirs in SLO_16K.items():
        name = f"rag 16384 {scheduler}"
        rows.append(share(results, f"16384 tokens, {scheduler}: SLO", name, "ttft_slo_share", theirs))
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    from benchmarks import plots as look

    made, [axes] = look.figure()
    lengths = [tokens for tokens in TABLE_3 if f"rag {tokens} RR" in results.runs]
    series = {}
    for at, base in enumerate(("RR", "CLA*")):
        ours = [
            results.reduction_percent(f"rag {n} {base}", f"rag {n} NetKV-Full", "ttft_mean_s")
            for n in lengths
        ]
        series[f"vs {base}"] = look.Series(lengths, [mean for mean, _ in ours], [half for _, half in ours])
        paper = [-TABLE_3[n][at] for n in lengths]
        series[f"vs {base}, paper"] = look.Series(lengths, paper, quiet=True)
    look.lines(axes, series, "prompt tokens", "mean TTFT shorter by, %", log_x=True)
    return {"netkv_context": made}
