"""NetKV's overload at 32K and 64K tokens (VI-D, Table III): is it KV memory?

Beyond 16K the paper's workload "exceeds the simulated capacity of all schedulers", and NetKV's gain falls to 6.7 and
4.3 % at 32K. It does not say which capacity. Links cannot be it (`netkv_context`), and prefill has no queue
(`netkv_common`). What is left is memory: VI-A has "45 GB of free HBM" on each GPU, so 180 GB an instance of four GPUs,
as in all other experiments. But its s_r in m_d >= s_eff + m_min is the aggregate of all four shards (III-B). If m_d is
what one GPU has free, an instance has 45 GB for it, a quarter: eight prompts of 16K, four of 32K and two of 64K, and
their cached prefixes. Twelve instances then serve fewer requests a second than arrive at 64K, and about as many at 32K.

Three sizes run at three lengths. The hypothesis holds if with 45 GB all four changes of mean TTFT at 32K and 64K are
within 3 points of Table III's, and those at 16K stay what they are with 180 GB, within 3 points. The figures are how
many do by their means; the aims are judged by the interval of each change over the windows. These are aims of our own,
about a cause; the paper's figures are counted in `netkv_context`. The paper rejects a request that fits nowhere; ours
waits in the pool, and its wait is a part of TTFT. A measured request without a first token would be missing from the
mean, so a run with one fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.experiments import netkv_common as common
from benchmarks.experiments.base import Config, Metrics, Results, Row, Variant, aimed
from benchmarks.experiments.netkv_columns import TABLE_3 as OTHER_COLUMNS
from benchmarks.experiments.netkv_common import WINDOWS, added, measured, milliseconds, named, share
from benchmarks.experiments.netkv_context import TABLE_3
from benchmarks.seeds import met, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SEEDS", "SUMMARY", "compare", "plots", "run_one", "variants"]

SUMMARY = "NetKV's overload at 32K and 64K tokens: KV memory of 180, 90 and 45 GB an instance"
SEEDS = (WINDOWS, 1)
WHOLE, QUARTER = "180 GB", "45 GB"
SIZES = {WHOLE: 1.0, "90 GB": 0.5, QUARTER: 0.25}
KEPT, LENGTHS = 16384, (16384, 32768, 65536)
RR, CLA, FULL = "RR", "CLA*", "NetKV-Full"
SHOWN = (RR, CLA, FULL)
TTFT, TBT, SLO, POOL = "ttft_mean_s", "tbt_mean_s", "ttft_slo_share", "pool_mean_s"
WITHIN = 3.0


def variants(quick: bool) -> list[Variant]:
    return [
        named("rag", scheduler, str(tokens), size, prompt_tokens=tokens, kv_share=part, windows=WINDOWS)
        for size, part in SIZES.items()
        if not quick or size != "90 GB"
        for tokens in (LENGTHS[:2] if quick else LENGTHS)
        for scheduler in SHOWN
    ]


def run_one(config: Config, seed: int) -> Metrics:
    """Simulates one window. Raises ValueError where a measured request has not finished: means would lack it."""
    found = common.run_one(config, seed)
    if found["unfinished"] or found["rejected"]:
        raise ValueError(
            f"{found['unfinished']} requests have not finished and {found['rejected']} were rejected: all have to end"
        )
    return found


def compare(results: Results) -> list[Row]:
    lengths = [tokens for tokens in LENGTHS if f"rag {tokens} {WHOLE} {RR}" in results.runs]
    rows = _judged(results, lengths)
    for size in SIZES:
        for tokens in lengths:
            if f"rag {tokens} {size} {RR}" in results.runs:
                rows += _beside(results, size, tokens)
    return rows


def _judged(results: Results, lengths: list[int]) -> list[Row]:
    """Returns the rows of our own aims: how many changes of mean TTFT are as the hypothesis has them."""
    near: list[list[float]] = []
    kept: list[list[float]] = []
    for tokens in lengths:
        for rival, theirs in zip((RR, CLA), TABLE_3[tokens], strict=True):
            ours = _changes(results, tokens, QUARTER, rival)
            if tokens == KEPT:
                whole = _changes(results, tokens, WHOLE, rival)
                kept.append([a - b for a, b in zip(ours, whole, strict=True)])
            else:
                near.append([change - theirs for change in ours])
    return [
        _within(f"{QUARTER}: changes of mean TTFT beyond 16K within 3 points of Table III's", near),
        _within(f"{QUARTER}: changes of mean TTFT at 16K within 3 points of those with {WHOLE}", kept),
    ]


def _within(name: str, apart: list[list[float]]) -> Row:
    """Returns the row with the number of changes whose mean is within the aim; `apart` has, seed by seed, how many
    points each change is from what it should be.
    """
    seen = [spread(points) for points in apart]
    wide = [one.half_width or 0.0 for one in seen]
    verdicts = [
        met(one.mean - half, one.mean + half, least=-WITHIN, most=WITHIN)
        for one, half in zip(seen, wide, strict=True)
    ]
    shown = ", ".join(f"{one.mean:+.1f} ± {half:.1f}" for one, half in zip(seen, wide, strict=True))
    number = float(sum(abs(one.mean) <= WITHIN for one in seen))
    return aimed(Row(f"{name}, of {len(apart)}", None, number, note=f"apart: {shown}"), "all", also=verdicts)


def _changes(results: Results, tokens: int, size: str, rival: str) -> list[float]:
    """Returns the change of mean TTFT from a rival to NetKV-Full in per cent, seed by seed."""
    at = f"rag {tokens} {size}"
    pairs = zip(results.values(f"{at} {rival}", TTFT), results.values(f"{at} {FULL}", TTFT), strict=True)
    return [100.0 * (ours / base - 1.0) for base, ours in pairs]


def _beside(results: Results, size: str, tokens: int) -> list[Row]:
    """Returns rows with Table III's columns beside ours, and the wait for memory."""
    at, rows = f"rag {tokens} {size}", []
    tbt_ms, *slos = OTHER_COLUMNS[tokens]
    for rival, ttft, slo in zip((RR, CLA), TABLE_3[tokens], slos, strict=True):
        what = f"{size}, {tokens} tokens, NetKV-Full against {rival}"
        rows.append(measured(results, what, f"{at} {rival}", f"{at} {FULL}", ttft))
        rows.append(added(results, f"{what}: SLO", f"{at} {rival}", f"{at} {FULL}", SLO, slo, "points"))
    what = f"{size}, {tokens} tokens, NetKV-Full against CLA*: TBT"
    rows.append(added(results, what, f"{at} {CLA}", f"{at} {FULL}", TBT, tbt_ms, "ms"))
    for scheduler in SHOWN:
        name, what = f"{at} {scheduler}", f"{size}, {tokens} tokens, {scheduler}"
        rows.append(milliseconds(results, f"{what}: TTFT", name, TTFT, None))
        rows.append(milliseconds(results, f"{what}: wait in the pool", name, POOL, None))
        rows.append(share(results, f"{what}: SLO", name, SLO, None))
    return rows


def plots(results: Results) -> Mapping[str, Figure]:
    return {}
