"""The tree in which weights spread: whom a lender feeds itself, and to whom it sends the others.

A lender feeds at most `fan_out` readers. Whoever comes beyond that learns of these readers, which lend each piece on
as it comes, and asks them instead; one that is full answers likewise. Nobody has to know the tree. The reader to which
fewest were sent is named first, so that the tree stays balanced; all are named, because each may be gone.

    n readers in all, nobody leaves: depth <= ceil(log2(n + 2)) - 1 for a fan-out of 2
    time, ports alone: (bytes + (depth - 1) * piece) * fan_out / rate   (`benchmarks/sim/fork.py`; a star: n * bytes)
"""

from collections.abc import Sequence
from typing import NamedTuple

FAN_OUT = 2
"""Readers that a lender feeds at once. ASSUMPTION: with k the whole tree takes some k / log k; 3 would be a little
faster than 2, which leaves a lender that serves more of its link."""


class Reader(NamedTuple):
    """A reader that a lender feeds: where it lends, and how many others were sent to it first."""

    name: str
    addresses: tuple[str, ...]
    referred: int = 0


def instead(readers: Sequence[Reader], fan_out: int = FAN_OUT) -> list[Reader] | None:
    """Returns None if a lender with these readers, in the order in which they came, feeds one more itself; otherwise
    the readers to ask instead, the best first. There are none if nobody of them lends.
    """
    if len(readers) < fan_out:
        return None
    return sorted((reader for reader in readers if reader.addresses), key=lambda reader: reader.referred)
