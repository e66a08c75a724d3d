"""The report of `benchmarks.live.balance`: the figures of each policy, computed from the samples of its windows."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.live.stats import percentile
from benchmarks.loads import Seen

Block = Mapping[str, Any]
"""The samples of one policy's window in one round: `block_of` has its keys."""


def block_of(policy: str, seen: Seen, ttft_s: Sequence[float]) -> dict[str, Any]:
    """Returns the samples of one window as results keep them; times have milliseconds.

    `imbalance_tokens`, `mean_load_tokens` and `pool` have one value for each clock tick, `waits_s` one for each request
    that left the pool, `ttft_s` one for each first text. `tokens` is the output of the requests that ended, and
    `departures` the number of departures that were forecast.
    """
    return {
        "policy": policy,
        "imbalance_tokens": [round(tokens) for tokens in seen.imbalance],
        "mean_load_tokens": [round(tokens) for tokens in seen.mean_load],
        "pool": list(seen.pool),
        "waits_s": [round(wait_s, 3) for wait_s in seen.waits_s],
        "ttft_s": [round(took_s, 3) for took_s in ttft_s],
        "tokens": seen.tokens,
        "departures": seen.departures,
    }


def blocks_of(rounds: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Returns the blocks of all rounds of a result, in order."""
    return [block for one in rounds for block in one["blocks"]]


def table(window_s: float, blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Returns one row for each policy, over all of its windows of `window_s` seconds each.

    `tok_s` counts the output of the requests that ended in the windows, `wait` figures are of those that left the pool,
    and `departures` are the departures that were forecast. The first policy is the one with which the others are
    compared.
    """
    by_policy: dict[str, list[Block]] = {}
    for block in blocks:
        by_policy.setdefault(block["policy"], []).append(block)
    first = next(iter(by_policy), "")
    base = statistics.fmean(_all(by_policy[first], "imbalance_tokens"))
    rows = []
    for policy, mine in by_policy.items():
        imbalance = _all(mine, "imbalance_tokens")
        pool, waits_s, took_s = _all(mine, "pool"), _all(mine, "waits_s"), _all(mine, "ttft_s")
        rows.append(
            {
                "policy": policy,
                "imbalance_tokens": round(statistics.fmean(imbalance)),
                f"below_{first}": round(base / statistics.fmean(imbalance), 2),
                "mean_load_tokens": round(statistics.fmean(_all(mine, "mean_load_tokens"))),
                "pool": round(statistics.fmean(pool), 1),
                "pool_empty_share": round(sum(p == 0 for p in pool) / len(pool), 3),
                "tok_s": round(sum(block["tokens"] for block in mine) / (window_s * len(mine))),
                "wait_mean_s": _rounded(statistics.fmean(waits_s) if waits_s else None),
                "wait_p99_s": _rounded(percentile(waits_s, 0.99) if waits_s else None),
                "wait_longest_s": _rounded(max(waits_s, default=None)),
                "ttft_mean_s": _rounded(statistics.fmean(took_s) if took_s else None),
                "ttft_p99_s": _rounded(percentile(took_s, 0.99) if took_s else None),
                "departures": sum(block["departures"] for block in mine),
                "samples": len(imbalance),
            }
        )
    return rows


def _all(blocks: Sequence[Block], name: str) -> list[float]:
    return [value for block in blocks for value in block[name]]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
