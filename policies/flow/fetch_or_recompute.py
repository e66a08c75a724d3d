"""Whether a prefill fetches a prefix's KV from another engine or computes it again (stage 1, MFS 2.2).

    fetch = lend + ahead + bytes / (bytes/s of the path)
    ahead = max over the lender's egress and the reader's ingress of bytes that go before it / (bytes/s of the port)
    recompute = tokens * seconds per token
    fetched if  fetch * (1 + margin) < recompute
    patience = min(recompute - ahead - bytes / (bytes/s of the path), max(slack, lend * (1 + margin)))

`lend` is the time until the lender's lease stands: its queue and a prefill of prefix + 1 token, nearly all of it a hit.
Where flow agents order the reads at both nodes, `ahead` is the time for what goes before the fetch at the level that it
gets from their policy (`policies.flow.ahead`), and the path's bytes/s are those of a transfer alone. Elsewhere it is 0,
and the path's bytes/s are what the transfers under way leave, shared evenly (`policies.dispatch.lending`). All of it
delays the same request, so the difference is what the request gains.

Not claimed: what either way costs others, which the arbiter's levels and the bound on lending keep small; and what
comes to the ports from the report on. While the lease is made as much is taken to come as goes, so `ahead` is that of
the decision. A flow whose level rises meanwhile is counted at its former one, and so is the fetch itself.

`patience` bounds the wait for the lease. Later than the first term, computing would have been faster, so a loan that
fails costs at most as much again as it was to save. A request with a TTFT objective waits no longer than it may and
still be in time by computing (`slack`), but as long as the loan is expected to take.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple

from policies.flow.base import BadEvent
from policies.routing.params import Number, Whole, check


class FetchReason(StrEnum):
    """The reason of a choice between fetching and computing again."""

    FASTER = "faster"
    """The fetch is expected to be done earlier, by more than the margin."""
    SLOWER = "slower"
    """Computing is expected to be done earlier, or no later than the margin."""
    TOO_SHORT = "too_short"
    """The prefix has fewer tokens than are worth a fetch."""
    LENDER_FULL = "lender_full"
    """The lender's KV cache is used too much to pin more of it."""


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """When a prefix is worth fetching."""

    margin: Annotated[float, Number(low=0.0)] = 0.25
    """Share by which the fetch must be expected to be faster, because a failed fetch is computed again as well."""
    least_tokens: Annotated[int, Whole(1, unit="tokens")] = 256
    """Fewest tokens that the prefix at the lender must be longer than the reader's own."""
    most_kv_used: Annotated[float, Number(0.0, 1.0)] = 0.9
    """Share of the lender's KV cache in use from which it lends nothing: a lease pins blocks."""

    def __post_init__(self) -> None:
        check(self, "fetch or recompute")


class Ahead(NamedTuple):
    """The bytes that go before a fetch at one of its ports, and the bytes/s that the port gives."""

    size: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A prefix that another engine holds, as seen when the reader has been chosen. All times in seconds."""

    tokens: int
    """Tokens that the reader would compute otherwise."""
    size: int
    """Bytes of their KV."""
    lend_s: float
    """Expected time until the lender's lease stands."""
    compute_s_per_token: float
    """The reader's prefill time of a token."""
    bytes_per_s: float
    """Bandwidth of the path from the lender to the reader: of a transfer alone where `ahead` is known, else as the
    transfers under way there leave it.
    """
    ahead: tuple[Ahead, ...] = ()
    """Bytes before the fetch at the lender's egress and at the reader's ingress; empty where no flow agents tell of
    them.
    """
    lender_kv_used: float = 0.0
    """Share of the lender's KV cache that is in use."""
    slack_s: float = math.inf
    """Time that the request may lose and still meet its TTFT objective by computing; infinite without an objective, and
    negative where it will miss it.
    """


@dataclass(frozen=True, slots=True)
class FetchChoice:
    """Whether to fetch, why, the longest wait for the lender's lease, and the numbers for `explain`."""

    fetch: bool
    reason: FetchReason
    fetch_s: float
    recompute_s: float
    patience_s: float
    terms: Mapping[str, float]


def choose(prefix: Prefix, config: FetchConfig) -> FetchChoice:
    """Returns the choice. Raises BadEvent for a number that is negative or NaN, or a path or port without bandwidth."""
    _check(prefix)
    move_s = prefix.size / prefix.bytes_per_s
    ahead_s = max((size / bytes_per_s for size, bytes_per_s in prefix.ahead), default=0.0)
    fetch_s = prefix.lend_s + ahead_s + move_s
    recompute_s = prefix.tokens * prefix.compute_s_per_token
    if prefix.tokens < config.least_tokens:
        reason = FetchReason.TOO_SHORT
    elif prefix.lender_kv_used >= config.most_kv_used:
        reason = FetchReason.LENDER_FULL
    elif fetch_s * (1 + config.margin) < recompute_s:
        reason = FetchReason.FASTER
    else:
        reason = FetchReason.SLOWER
    terms = {"lend_s": prefix.lend_s, "move_s": move_s, "tokens": float(prefix.tokens)}
    if prefix.ahead:
        terms["ahead_s"] = ahead_s
    least_s = prefix.lend_s * (1 + config.margin)
    patience_s = max(0.0, min(recompute_s - ahead_s - move_s, max(prefix.slack_s, least_s)))
    return FetchChoice(reason is FetchReason.FASTER, reason, fetch_s, recompute_s, patience_s, terms)


def _check(prefix: Prefix) -> None:
    for name in ("tokens", "size", "lend_s", "compute_s_per_token", "lender_kv_used"):
        value = getattr(prefix, name)
        if not (math.isfinite(value) and value >= 0):
            raise BadEvent(f"prefix: {name} is {value!r}: it must be finite and at least 0")
    for ahead in prefix.ahead:
        if not (math.isfinite(ahead.size) and ahead.size >= 0):
            raise BadEvent(f"prefix: ahead has {ahead.size!r} bytes: they must be finite and at least 0")
        if not (math.isfinite(ahead.bytes_per_s) and ahead.bytes_per_s > 0):
            raise BadEvent(
                f"prefix: ahead has {ahead.bytes_per_s!r} bytes/s: they must be finite and above 0"
            )
    if not (math.isfinite(prefix.bytes_per_s) and prefix.bytes_per_s > 0):
        raise BadEvent(f"prefix: bytes_per_s is {prefix.bytes_per_s!r}: it must be finite and above 0")
    if math.isnan(prefix.slack_s):
        raise BadEvent("prefix: slack_s is nan: it must be a number")
