"""Functions that change a workload before it is run: they select requests, or change their times or their fields.

All but `at_rate`, `compression_for`, `split_by_time` and `rebase` work on streams. None changes the order of requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice

import numpy as np

from benchmarks.workloads.record import WorkloadError, WorkloadRequest


def checked(requests: Iterable[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    """Yields the requests unchanged, and raises a WorkloadError that names the first that cannot be run.

    Requests must be in order of time, with times >= 0 s, token counts >= 1, and no more blocks than the prompt has.
    """
    last_s = 0.0
    for r in requests:
        if not (math.isfinite(r.at_s) and r.at_s >= last_s):
            raise WorkloadError(
                f"request {r.request_id}: at {r.at_s} s, after one at {last_s} s: not in order of time"
            )
        if r.prompt_tokens < 1 or r.output_tokens < 1:
            raise WorkloadError(
                f"request {r.request_id}: {r.prompt_tokens} prompt and {r.output_tokens} output tokens; give at least 1"
            )
        if len(r.block_hashes) * r.block_tokens > r.prompt_tokens:
            raise WorkloadError(
                f"request {r.request_id}: {len(r.block_hashes)} blocks of {r.block_tokens} tokens do not fit in its "
                f"prompt of {r.prompt_tokens}"
            )
        last_s = r.at_s
        yield r


def compress(requests: Iterable[WorkloadRequest], factor: float) -> Iterator[WorkloadRequest]:
    """Yields the requests with their times divided by `factor` (> 0), as NetKV (VI-A) does.

    A factor of 2 doubles the rate and keeps the burstiness.
    """
    if not (factor > 0 and math.isfinite(factor)):
        raise WorkloadError(f"a time compression of {factor}: give a number above 0")
    return (replace(r, at_s=r.at_s / factor) for r in requests)


def at_rate(requests: Sequence[WorkloadRequest], rate_per_s: float) -> list[WorkloadRequest]:
    """Returns the requests with their times divided by one factor, such that the mean rate becomes `rate_per_s`."""
    return list(compress(requests, compression_for(requests, rate_per_s)))


def compression_for(requests: Sequence[WorkloadRequest], rate_per_s: float) -> float:
    """Returns the factor that `at_rate` uses: `rate_per_s` over the mean rate between the first and the last request.

    Raises WorkloadError where there are not two requests at different times.
    """
    if len(requests) < 2 or requests[-1].at_s <= requests[0].at_s:
        raise WorkloadError("a rate needs at least two requests at different times")
    return rate_per_s * (requests[-1].at_s - requests[0].at_s) / (len(requests) - 1)


def spread_ticks(requests: Iterable[WorkloadRequest], tick_s: float, seed: int) -> Iterator[WorkloadRequest]:
    """Spreads requests of equal time uniformly over the `tick_s` seconds that follow, in their order.

    This is for traces whose clock ticks coarsely (Mooncake conversation: 3 s). Where the next request's tick comes
    sooner than `tick_s`, requests are spread up to that tick.
    """
    if not (tick_s > 0 and math.isfinite(tick_s)):
        raise WorkloadError(f"a tick of {tick_s} s: give a number above 0")
    rng = np.random.default_rng(seed)
    waiting: list[WorkloadRequest] = []
    for at_s, group in groupby(requests, key=lambda r: r.at_s):
        if waiting:
            yield from _spread(waiting, min(tick_s, at_s - waiting[0].at_s), rng)
        waiting = list(group)
    yield from _spread(waiting, tick_s, rng)


def _spread(
    group: list[WorkloadRequest], width_s: float, rng: np.random.Generator
) -> Iterator[WorkloadRequest]:
    offsets_s = np.sort(rng.random(len(group))) * width_s
    for r, offset_s in zip(group, offsets_s.tolist(), strict=True):
        yield replace(r, at_s=r.at_s + offset_s)


def window(
    requests: Iterable[WorkloadRequest], start_s: float = 0.0, end_s: float = math.inf
) -> Iterator[WorkloadRequest]:
    """Yields the requests that come in [start_s, end_s), with times counted from `start_s`."""
    if not 0 <= start_s < end_s:
        raise WorkloadError(f"a window from {start_s} to {end_s} s: give 0 <= start < end")
    for r in requests:
        if r.at_s >= end_s:
            return
        if r.at_s >= start_s:
            yield replace(r, at_s=r.at_s - start_s)


def first(requests: Iterable[WorkloadRequest], count: int) -> Iterator[WorkloadRequest]:
    """Yields the first `count` requests, or all where there are fewer."""
    return islice(requests, count)


@dataclass(frozen=True, slots=True)
class LengthFilter:
    """A filter that keeps requests whose token counts lie within the bounds, both ends included. None is no bound."""

    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    min_output_tokens: int | None = None
    max_output_tokens: int | None = None

    def keeps(self, r: WorkloadRequest) -> bool:
        return _within(r.prompt_tokens, self.min_prompt_tokens, self.max_prompt_tokens) and _within(
            r.output_tokens, self.min_output_tokens, self.max_output_tokens
        )


def _within(value: int, low: int | None, high: int | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def select(requests: Iterable[WorkloadRequest], lengths: LengthFilter) -> Iterator[WorkloadRequest]:
    """Yields the requests that `lengths` keeps. Times stay as they are, so the rate falls with the requests' number."""
    return (r for r in requests if lengths.keeps(r))


def split_by_time(
    requests: Sequence[WorkloadRequest], held_out_share: float = 0.2
) -> tuple[list[WorkloadRequest], list[WorkloadRequest]]:
    """Splits the requests as `predictors.train` does; times are kept. Returns (earlier part, last `held_out_share`).

    Predictors and weights may be tuned on the first part only, and are judged on the second.
    """
    if not 0.0 < held_out_share < 1.0:
        raise WorkloadError(f"held_out_share {held_out_share} must lie between 0 and 1")
    cut = int(len(requests) * (1.0 - held_out_share))
    return list(requests[:cut]), list(requests[cut:])


def rebase(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """Returns the requests with times counted from the first."""
    return [replace(r, at_s=r.at_s - requests[0].at_s) for r in requests]


def with_prompt_tokens(requests: Iterable[WorkloadRequest], prompt_tokens: int) -> Iterator[WorkloadRequest]:
    """Yields the requests with prompts of `prompt_tokens` tokens, as in NetKV's length sweep.

    The new prompts share no prefix and none recurs; `prefixes.share_prefixes` can make them share.
    """
    if prompt_tokens < 1:
        raise WorkloadError(f"prompts of {prompt_tokens} tokens: give at least 1")
    return (
        replace(r, prompt_tokens=prompt_tokens, block_hashes=(), block_tokens=0, prompt_key="")
        for r in requests
    )


def with_class(
    requests: Iterable[WorkloadRequest],
    request_class: str,
    ttft_slo_s: float | None = None,
    tpot_slo_s: float | None = None,
    priority: int = 0,
) -> Iterator[WorkloadRequest]:
    """Yields the requests with this class, these SLOs (seconds) and this priority."""
    for r in requests:
        yield replace(
            r, request_class=request_class, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s, priority=priority
        )
