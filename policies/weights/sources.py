"""The engines from which a new engine may read its weights, the nearest first.

Engines of equal distance take turns, so that many engines that start at once do not all begin at the same one.
"""

from collections.abc import Sequence
from typing import NamedTuple

MOST_SOURCES = 4
"""Engines that are named to one asker. ASSUMPTION: where four do not answer, a fifth will not either."""


class Source(NamedTuple):
    """An engine that lends its weights. `tier` is its distance by the network oracle; None: nobody knows."""

    engine: str
    tier: int | None
    addresses: tuple[str, ...]


def nearest(sources: Sequence[Source], turn: int, most: int = MOST_SOURCES) -> list[Source]:
    """Returns at most `most` sources by distance, unknown ones last. Among equals number `turn` of their order by name
    comes first.
    """
    known = sorted({source.tier for source in sources if source.tier is not None})
    found: list[Source] = []
    for tier in [*known, None]:
        equal = sorted(
            (source for source in sources if source.tier == tier), key=lambda source: source.engine
        )
        first = turn % len(equal) if equal else 0
        found += equal[first:] + equal[:first]
    return found[:most]
