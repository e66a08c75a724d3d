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
from dataclasses import replace
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
SHARED, SHARED_TOKENS = "2K shared", 2_048
NARROW, NARROW_TOKENS, NARROW_NICS = (
    "2K shared, 62 GB/s",
    32_768,
    5,
)  # 5 NICs a server: 10 uplinks of 50 Gbit/s a rack
ALL_NEAR, ALL_NEAR_TOKENS = "NetKV-Topo-Only", 16_384
SLO_16K = {"RR": 79.1, "NetKV-Full": 99.2}


def variants(quick: bool) -> list[Variant]:
    lengths = (1024, 16384) if quick else tuple(TABLE_3)
    made = [named("rag", s, str(tokens), prompt_tokens=tokens) for tokens in lengths for s in SHOWN]
    if quick:
        return made
    made.append(named("rag", ALL_NEAR, str(ALL_NEAR_TOKENS), prompt_tokens=ALL_NEAR_TOKENS))
    fixed = {"shared_tokens": SHARED_TOKENS}
    made += [named("rag", s, str(n), SHARED, prompt_tokens=n, **fixed) for n in lengths for s in SHOWN]
    narrow = {"prompt_tokens": NARROW_TOKENS, "nics": NARROW_NICS, **fixed}
    return made + [named("rag", s, str(NARROW_TOKENS), NARROW, **narrow) for s in SHOWN]


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
    return rows if results.quick else rows + _causes(results)


def _causes(results: Results) -> list[Row]:
    """The figures behind the causes above: what Table III implies beside ours, without an aim."""
    rows = []
    for label in ("", f" {SHARED}"):
        for tokens, (vs_rr, vs_cla) in TABLE_3.items():
            paper = round(100.0 * ((1 + vs_rr / 100) / (1 + vs_cla / 100) - 1), 1)
            at = f"rag {tokens}{label}"
            rows.append(
                _measured(results, f"{tokens} tokens{label}, CLA* vs RR", f"{at} RR", f"{at} CLA*", paper)
            )
    cells = [(tokens, f"rag {tokens} {SHARED}") for tokens in TABLE_3]
    for tokens, at in [*cells, (NARROW_TOKENS, f"rag {NARROW_TOKENS} {NARROW}")]:
        for base, paper in zip(("RR", "CLA*"), TABLE_3[tokens], strict=True):
            what = f"{at.removeprefix('rag ')}, NetKV-Full against {base}"
            rows.append(_measured(results, what, f"{at} {base}", f"{at} NetKV-Full", paper))
    at = f"rag {ALL_NEAR_TOKENS}"
    what = f"{ALL_NEAR_TOKENS} tokens, all in the pod, vs CLA*"
    rows.append(_measured(results, what, f"{at} CLA*", f"{at} {ALL_NEAR}", TABLE_3[ALL_NEAR_TOKENS][1]))
    return rows


def _measured(results: Results, what: str, base: str, ours: str, paper: float) -> Row:
    return replace(reduction(results, what, base, ours, paper), aim="", met=None)


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
