"""The subset of a window that maximises a concave score of its sum: BalanceRoute's stage 2 (D.4), by bitsets, exact.

The score depends on S only through w = sum of s_r and is concave in w: F(S, g) = w - G max(0, w - m) is, and so is
F_H, a line minus convex terms. Let `peak` be a maximiser over all real w. Then among the reachable sums the best one is
the largest not above the peak or the smallest above it: two probes per cardinality are exact for BR-0 and for BR-H
alike (the paper probes twice for BR-0 only, and enumerates 2^W subsets for BR-H).

    reach_c = bitmask of the sums that c sequences can have; item (s, k): reach_(c+k) |= reach_c << s, c descending

Sums above peak + max s are never needed: taking any item out of such a set leaves a sum above the peak, nearer to it.
Cost: W * slots shift-ORs of (peak + max s) bits. A set must also fit the worker: w <= room - reserve * sequences.
Windows of up to FEW items have so few subsets that all their sums in one product are cheaper; the same set is chosen.
(`stages_kernel.best_set` is that compiled, for BR-0 and BR-H.)
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FEW = 9  # items whose 2^n subsets are summed at once


@dataclass(frozen=True, slots=True)
class Chosen:
    """Indices into the window (ascending), their sum w in tokens, and the score."""

    indices: tuple[int, ...]
    tokens: int
    score: float


def best_subset(
    tokens: Sequence[int],
    sequences: Sequence[int],
    slots: int,
    room_tokens: int,
    reserve_tokens: int,
    peak_tokens: float,
    score: Callable[[list[int]], list[float]],
) -> Chosen | None:
    """The non-empty subset of best score, None if no item fits. Equal scores: the smaller sum, then fewer sequences,
    then the items that stand first.

    `tokens[i]` > 0 and `sequences[i]` > 0 are item i's s_r and slots. `score` maps sums to scores.
    """
    if not tokens:
        return None
    peak = max(0, int(min(peak_tokens, sum(tokens))))
    easy = _without_search(tokens, sequences, slots, room_tokens, reserve_tokens, peak)
    if easy is not None:
        w = sum([tokens[i] for i in easy])
        return Chosen(easy, w, score([w])[0])
    search = _by_sums if len(tokens) <= FEW else _by_bitsets
    return search(tokens, sequences, slots, room_tokens, reserve_tokens, peak, score)


def _by_sums(
    tokens: Sequence[int],
    sequences: Sequence[int],
    slots: int,
    room_tokens: int,
    reserve_tokens: int,
    peak: int,
    score: Callable[[list[int]], list[float]],
) -> Chosen | None:
    """All subsets at once; index + 1 is a subset's bitmask."""
    members, sizes = _subsets(len(tokens))
    sums = members @ np.array(tokens, dtype=np.float64)
    counts = sizes if max(sequences) == 1 else members @ np.array(sequences, dtype=np.float64)
    allowed = sums
    if slots < sum(sequences) or room_tokens < sum(tokens) + reserve_tokens * sum(sequences):
        ok = (counts <= slots) & (sums + reserve_tokens * counts <= room_tokens)
        sums, allowed = np.where(ok, sums, -1.0), sums[ok]
        if not allowed.size:
            return None
    below = allowed <= peak
    low, high = allowed[below], allowed[~below]
    probes = [int(found) for found in (*_maximum(low), *_minimum(high))]
    scores = score(probes)
    best = 1 if len(probes) == 2 and scores[1] > scores[0] else 0
    hits = np.flatnonzero(sums == probes[best])
    mask = int(hits[counts[hits].argmin()]) + 1
    chosen = tuple(i for i in range(len(tokens)) if mask >> i & 1)
    return Chosen(chosen, probes[best], scores[best])


def _maximum(sums: npt.NDArray[np.float64]) -> tuple[float, ...]:
    return (sums.max(),) if sums.size else ()


def _minimum(sums: npt.NDArray[np.float64]) -> tuple[float, ...]:
    return (sums.min(),) if sums.size else ()


@functools.cache
def _subsets(n: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The non-empty subsets of n items as rows of 0 and 1, shape (2^n - 1, n), and their sizes."""
    members = (np.arange(1, 1 << n)[:, None] >> np.arange(n) & 1).astype(np.float64)
    return members, members.sum(axis=1)


def _by_bitsets(
    tokens: Sequence[int],
    sequences: Sequence[int],
    slots: int,
    room_tokens: int,
    reserve_tokens: int,
    peak: int,
    score: Callable[[list[int]], list[float]],
) -> Chosen | None:
    """Per number of sequences the reachable sums as the bits of one number."""
    highest = peak + max(tokens)
    reached = _reach(tokens, sequences, slots, highest)
    below = (1 << (peak + 1)) - 1
    probes: list[tuple[int, int]] = []  # (sum, sequences)
    for count in range(1, slots + 1):
        limit = room_tokens - reserve_tokens * count
        if limit <= 0:
            break
        bits = reached[-1][count]
        if limit < highest:
            bits &= (1 << (limit + 1)) - 1
        low, high = bits & below, bits >> (peak + 1)
        if low:
            probes.append((low.bit_length() - 1, count))
        if high:
            probes.append((peak + (high & -high).bit_length(), count))
    if not probes:
        return None
    probes.sort()
    scores = score([w for w, _ in probes])
    best = scores.index(max(scores))  # the first: the smaller sum, then fewer sequences
    w, count = probes[best]
    return Chosen(_trace(reached, tokens, sequences, count, w), w, scores[best])


def _without_search(
    tokens: Sequence[int],
    sequences: Sequence[int],
    slots: int,
    room_tokens: int,
    reserve_tokens: int,
    peak: int,
) -> tuple[int, ...] | None:
    """The best subset where it is plain: the smallest item if each alone is above the peak (the score falls from there
    on), or the largest ones that the slots hold if even they stay below it. Items of one sequence only, all with room.
    """
    if max(sequences) > 1 or slots < 1:
        return None
    least = min(tokens)
    if least > peak:
        return (tokens.index(least),) if least + reserve_tokens <= room_tokens else None
    order = sorted(
        range(len(tokens)), key=tokens.__getitem__, reverse=True
    )  # stable: equal ones as they stand
    largest = order[:slots]
    w = sum([tokens[i] for i in largest])
    if w <= peak and w + reserve_tokens * len(largest) <= room_tokens:
        return tuple(sorted(largest))
    return None


def _reach(tokens: Sequence[int], sequences: Sequence[int], slots: int, highest: int) -> list[list[int]]:
    """Per number of items seen: per number of sequences: the bitmask of reachable sums up to `highest`."""
    mask = (1 << (highest + 1)) - 1
    reach = [1] + [0] * slots
    snapshots = [reach]
    for size, k in zip(tokens, sequences, strict=True):
        before, reach = reach, list(reach)
        for count in range(slots - k, -1, -1):
            if before[count]:
                reach[count + k] |= (before[count] << size) & mask
        snapshots.append(reach)
    return snapshots


def _trace(
    reached: list[list[int]], tokens: Sequence[int], sequences: Sequence[int], count: int, w: int
) -> tuple[int, ...]:
    chosen: list[int] = []
    for i in range(len(tokens) - 1, -1, -1):
        if reached[i][count] >> w & 1:
            continue  # reachable without item i
        chosen.append(i)
        count, w = count - sequences[i], w - tokens[i]
    return tuple(reversed(chosen))
