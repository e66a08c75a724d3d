"""The index pairs of a read, in an order in which NIXL joins neighbours into few descriptors.

NIXL joins two neighbours of a read's index lists only where both indices step by +1, in the order of the lists. FlowKV
calls the search for such runs bidirectional segment alignment (FlowKV 3.3).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np


def aligned(local: Any, remote: Any) -> tuple[Any, Any]:
    """Returns the index pairs of a read, sorted by the local index, as two new arrays. Local indices are distinct, so
    no other order joins more pairs: the only pair that `(a, b)` can join is `(a + 1, b + 1)`, and it comes next.

    Raises ValueError if `local` and `remote` differ in length.
    """
    ours, theirs = np.asarray(local), np.asarray(remote)
    if len(ours) != len(theirs):
        raise ValueError(f"a read pairs {len(ours)} local indices with {len(theirs)} remote ones")
    if (ours[:-1] < ours[1:]).all():
        return ours.copy(), theirs.copy()
    order = np.argsort(ours, kind="stable")
    return ours[order], theirs[order]


def pieces(local: Sequence[int], remote: Sequence[int]) -> int:
    """Returns the number of descriptors that NIXL makes of the index pairs in the given order."""
    pairs = list(zip(local, remote, strict=True))
    joints = sum(a + 1 == c and b + 1 == d for (a, b), (c, d) in pairwise(pairs))
    return len(pairs) - joints
