"""Divides the cores of a machine among its engines.

Unpinned engines share every core and stall each other: two of them on two cores decoded at 1,700 ms per token, pinned
ones at 130 ms (docs/design.md, section 8). The division is made once, when the graph is built.
"""

import os
from collections.abc import Sequence
from itertools import pairwise


def divide_cores(cores: Sequence[int], engines: int) -> tuple[tuple[int, ...], ...]:
    """One tuple of core numbers per engine, in engine order.

    Enough cores: disjoint runs of neighbours (they share caches), sizes that differ by one at most, the larger ones
    first. More engines than cores: one core each, dealt out in turn, so that engines share cores evenly and each runs
    one thread. Raises ValueError without cores or engines.
    """
    if not cores:
        raise ValueError("divide_cores needs at least one core; this process may run on none")
    if engines < 1:
        raise ValueError(f"divide_cores needs at least one engine, got {engines}")
    ordered = sorted(set(cores))
    if engines > len(ordered):
        return tuple((ordered[i % len(ordered)],) for i in range(engines))
    size, larger = divmod(len(ordered), engines)
    starts = [i * size + min(i, larger) for i in range(engines + 1)]
    return tuple(tuple(ordered[a:b]) for a, b in pairwise(starts))


def split_ranks(cores: Sequence[int], ranks: int) -> str:
    """`cores` as vLLM's VLLM_CPU_OMP_THREADS_BIND wants them: a list per worker rank, joined by `|`."""
    return "|".join(",".join(map(str, part)) for part in divide_cores(cores, ranks))


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))
