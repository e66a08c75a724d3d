"""What each order of blocks saves of stock vLLM's descriptors and what it costs in prefix hits, from measured rows."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.experiments.base import Row

LEAST_SAVED = {True: 93.0, False: 97.0}
"""Aims of `segments`, in per cent of stock vLLM's descriptors, by whether there is a prefix cache."""

MOST_POINTS = 1.0
"""Aim: most points of prefix hits that `segments` may cost."""

LEAST_CPU_SAVED = 90.0
"""Aim of `segments`, in per cent of the CPU time in which stock vLLM posts a read."""


def against_stock(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yields each other row with that of `stock` of the same setting."""
    for caching in (True, False):
        setting = [row for row in rows if row["prefix_cache"] is caching]
        stock = next(row for row in setting if row["variant"] == "stock")
        yield from ((row, stock) for row in setting if row is not stock)


def comparison(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each variant: what it saves of stock's pieces in the oldest pools, its cost in prefix hits."""
    lines = []
    for row, stock in against_stock(rows):
        change = 100 * (row["ages"][-1]["pieces"] / stock["ages"][-1]["pieces"] - 1)
        points = 100 * (row["prefix_hits"] - stock["prefix_hits"])
        cached = row["prefix_cache"]
        shown = f"{row['variant']}, prefix cache {'on' if cached else 'off'}: {change:+.1f} % pieces"
        lines.append(shown + (f", {points:+.2f} points of prefix hits" if cached else ""))
    return lines


def figures(whole: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the figures of a result file."""
    for row, stock in against_stock(whole["rows"]):
        cached, ours = row["prefix_cache"], row["variant"] == "segments"
        name = f"{row['variant']}, prefix cache {'on' if cached else 'off'}"
        change = {
            key: 100 * (row["made"][key] / stock["made"][key] - 1)
            for key in ("descriptors", "post_cpu_ms", "ms")
        }
        least = LEAST_SAVED[cached]
        yield Row(
            f"{name}: descriptors, against stock vLLM", None, change["descriptors"], "%",
            aim=f"at most -{least:g} %" if ours else "", met=change["descriptors"] <= -least if ours else None,
        )  # fmt: skip
        if cached:
            points = 100 * (row["prefix_hits"] - stock["prefix_hits"])
            yield Row(
                f"{name}: prefix hits, points against stock vLLM", None, points, "",
                aim=f"at least -{MOST_POINTS:g}" if ours else "", met=points >= -MOST_POINTS if ours else None,
            )  # fmt: skip
        yield Row(
            f"{name}: CPU time to post a read, against stock vLLM", None, change["post_cpu_ms"], "%",
            aim=f"at most -{LEAST_CPU_SAVED:g} %" if ours else "",
            met=change["post_cpu_ms"] <= -LEAST_CPU_SAVED if ours else None,
        )  # fmt: skip
        yield Row(f"{name}: seconds of a read, against stock vLLM", None, change["ms"], "%")
    for row in whole["rows"]:
        for age in row["ages"]:
            yield Row(
                f"{row['variant']}, prefix cache {'on' if row['prefix_cache'] else 'off'}, "
                f"after {age['pools_before']:g} pools: pieces a layer",
                None,
                age["pieces"],
                note=f"of {age['blocks']:g} blocks, {age['reads']} reads",
            )
