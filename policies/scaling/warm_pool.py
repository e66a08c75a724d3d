"""How many engines wait warm, and which engine goes first.

The pool covers what may come before a cold start ends: the engines for the high quantile of the demand at the lead of
a start, less those that serve. It is refilled in the background by starts, and shrinks only after it has been too
large for a while (the policy's own cool-down).

    warm = clamp(engines(upper(start lead, quantile)) - serving, warm_min, warm_max)
"""

from collections.abc import Iterable

from policies.scaling.base import Limits
from policies.scaling.observation import EngineView


def spare(serving: int, later: int, limits: Limits) -> int:
    """Returns the wanted number of warm engines, for `serving` engines now and `later` ones at the lead of a start."""
    return max(limits.warm_min, min(limits.warm_max, later - serving))


def first_to_activate(warm: Iterable[EngineView]) -> list[EngineView]:
    """Returns warm engines in the order of activation: the nearest to their peers, then the oldest, then by name."""
    return sorted(warm, key=lambda e: (e.distance, e.since_s, e.engine))


def first_to_leave(serving: Iterable[EngineView]) -> list[EngineView]:
    """Returns serving engines in the order in which they switch or leave: the least loaded, the farthest, the
    newest.
    """
    return sorted(
        serving, key=lambda e: (e.running + e.waiting, e.kv_usage, -e.distance, -e.since_s, e.engine)
    )
