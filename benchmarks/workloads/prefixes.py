"""Shared heads of prompts, as block hashes; and how much a cache of any size could save.

A prompt is a row of segments (what it says, how many tokens). The hash of a block depends on all segments up to the
block's end and on its place, so two prompts have equal hashes exactly as far as their segments agree.
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
    """A 63-bit hash of two numbers, the same everywhere: the finaliser of splitmix64 over both."""
    x = (first * 0x9E3779B97F4A7C15 + second + 0xD1B54A32D192ED03) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) >> 1


def _mixed(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """`mix` of two uint64 arrays."""
    x = first * np.uint64(0x9E3779B97F4A7C15) + second + np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((x ^ (x >> np.uint64(31))) >> np.uint64(1))


def block_hashes(segments: Sequence[Segment], block_tokens: int) -> tuple[int, ...]:
    """Hashes of the full blocks of a prompt made of `segments`."""
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
    """Cumulative popularity (count,) of ranks 1..count, each as likely as rank^-exponent; ends at 1."""
    if count < 1 or exponent < 0:
        raise WorkloadError(
            f"{count} items with Zipf exponent {exponent}: give at least 1 item, an exponent >= 0"
        )
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    ends: FloatArray = np.cumsum(weights) / weights.sum()
    return ends


@dataclass(frozen=True, slots=True)
class Sharing:
    """With probability `p_share` a prompt begins with one of `groups` known texts (Zipf popularity), which covers a
    share of it drawn uniformly from `covered`, or `covered_tokens` of it (all of a shorter one); two prompts of a group
    share the shorter cover.

    NetKV (VI-A) gives p_share (0.3 chatbot, 0.7 RAG, 0.1 long context) and no more:
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
    """The requests with new block hashes as `sharing` says; what they shared before is forgotten. Streams.

    A larger p_share makes more requests share and leaves the others as they are (same seed).
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
    """Share of all prompt tokens that a cache of unlimited size would have held; None without prompt tokens."""
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
