"""Shared beginnings of prompts, written as block hashes, and the share of tokens that an unlimited cache would save.

A prompt is a sequence of segments, pairs (content, tokens). The hash of a block depends on all segments up to the
block's end and on the block's position. So two prompts have equal hashes exactly as far as their segments agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.workloads.record import WorkloadError, WorkloadRequest
from predictors.protocol import FloatArray

_MASK = (1 << 64) - 1
Segment = tuple[int, int]  # (content, tokens)


def mix(first: int, second: int) -> int:
    """Returns a 63-bit hash of two numbers, made with the finaliser of splitmix64.

    It is the same in every process and on every machine.
    """
    x = (first * 0x9E3779B97F4A7C15 + second + 0xD1B54A32D192ED03) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) >> 1


def _mixed(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns `mix` of each pair of elements of two uint64 arrays of equal shape."""
    x = first * np.uint64(0x9E3779B97F4A7C15) + second + np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((x ^ (x >> np.uint64(31))) >> np.uint64(1))


def block_hashes(segments: Sequence[Segment], block_tokens: int) -> tuple[int, ...]:
    """Returns the hashes of the full blocks of a prompt made of `segments`; a last block that is not full has none."""
    known, ends, place, end = 0, [], [], 0
    for content, tokens in segments:
        known = mix(known, content)
        end += tokens
        place.append(known)
        ends.append(end)
    blocks = end // block_tokens
    last_tokens = (np.arange(blocks) + 1) * block_tokens - 1
    segment = np.searchsorted(np.array(ends), last_tokens, side="right")
    hashes: list[int] = _mixed(
        np.array(place, dtype=np.uint64)[segment], np.arange(blocks, dtype=np.uint64)
    ).tolist()
    return tuple(hashes)


def zipf_weights(count: int, exponent: float) -> FloatArray:
    """Returns the cumulative Zipf popularity (count,) of the ranks 1..count, which ends at 1.

    The probability of a rank is proportional to rank^-exponent.
    """
    if count < 1 or exponent < 0:
        raise WorkloadError(
            f"{count} items with Zipf exponent {exponent}: give at least 1 item, an exponent >= 0"
        )
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    ends: FloatArray = np.cumsum(weights) / weights.sum()
    return ends


@dataclass(frozen=True, slots=True)
class Sharing:
    """How prompts share their beginnings.

    With probability `p_share` a prompt begins with one of `groups` shared texts, chosen by Zipf popularity. The text
    covers a share of the prompt that is drawn uniformly from the interval `covered`. With `covered_tokens` it covers
    that many tokens instead, or the whole of a shorter prompt. Two prompts that begin with the same text share the
    shorter of their two covers.

    NetKV (VI-A) gives `p_share` only (0.3 chatbot, 0.7 RAG, 0.1 long context); the other fields are assumptions.
    """

    p_share: float
    groups: int = 64  # ASSUMPTION: number of shared texts
    zipf: float = 1.0  # ASSUMPTION: their popularity
    covered: tuple[float, float] = (0.25, 0.75)  # ASSUMPTION: half a prompt on average
    block_tokens: int = 512  # as Mooncake's hash_ids
    covered_tokens: int | None = None

    def __post_init__(self) -> None:
        low, high = self.covered
        if not (0.0 <= self.p_share <= 1.0 and 0.0 <= low <= high <= 1.0 and self.block_tokens >= 1):
            raise WorkloadError(f"{self}: p_share and covered must lie in 0..1, block_tokens be at least 1")
        if self.covered_tokens is not None and self.covered_tokens < 1:
            raise WorkloadError(f"{self}: covered_tokens must be at least 1, or None for `covered`")


def share_prefixes(
    requests: Iterable[WorkloadRequest], sharing: Sharing, seed: int
) -> Iterator[WorkloadRequest]:
    """Yields the requests with new block hashes, drawn by `sharing`; their session and prompt key are removed.

    With the same seed, a larger `p_share` makes more requests share and leaves the others as they are.
    """
    ends = zipf_weights(sharing.groups, sharing.zipf)
    low, high = sharing.covered
    rng = np.random.default_rng(seed)
    for number, r in enumerate(requests):
        shares, group_at, cover = rng.random(3).tolist()
        segments: list[Segment] = []
        head = 0
        if shares < sharing.p_share:
            group = int(np.searchsorted(ends, group_at, side="right"))
            head = int(r.prompt_tokens * (low + (high - low) * cover))
            if sharing.covered_tokens is not None:
                head = min(sharing.covered_tokens, r.prompt_tokens)
            segments.append((mix(1, group), head))
        segments.append((mix(2 + seed, number), r.prompt_tokens - head))
        yield replace(
            r,
            block_hashes=block_hashes(segments, sharing.block_tokens),
            block_tokens=sharing.block_tokens,
            prompt_key="",
            session="",
        )


def ideal_hit_share(requests: Iterable[WorkloadRequest]) -> float | None:
    """Returns the share of all prompt tokens that a cache of unlimited size would have held.

    Returns None where there are no prompt tokens.
    """
    seen: set[int] = set()
    hit = total = 0
    for r in requests:
        total += r.prompt_tokens
        for block in r.block_hashes:
            if block not in seen:
                break
            hit += r.block_tokens
        seen.update(r.block_hashes)
    return hit / total if total else None
