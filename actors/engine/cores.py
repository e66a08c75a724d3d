"""Division of a machine's cores among its engines.

Unpinned engines share every core and delay each other: two of them on two cores decoded at 1,700 ms per token, pinned
ones at 130 ms (docs/design.md, section 8). The division is made once, when the graph is built.
"""

import os
from collections.abc import Sequence
from itertools import pairwise


def divide_cores(cores: Sequence[int], engines: int) -> tuple[tuple[int, ...], ...]:
    """Returns one tuple of core numbers per engine, in engine order.

    With enough cores the engines get disjoint runs of neighbouring cores (which share caches). Their sizes differ by
    one at most, and the larger ones come first. With more engines than cores each engine gets one core, in turn, so
    that engines share the cores evenly and each runs one thread. Raises ValueError without cores or engines.
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
    """Returns `cores` in the format of vLLM's VLLM_CPU_OMP_THREADS_BIND: a list for each worker rank, joined by `|`."""
    return "|".join(",".join(map(str, part)) for part in divide_cores(cores, ranks))


def usable_cores() -> tuple[int, ...]:
    """Returns the cores on which this process may run, sorted."""
    return tuple(sorted(os.sched_getaffinity(0)))
