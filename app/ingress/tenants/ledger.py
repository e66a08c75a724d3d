"""The use that each key makes of its limits, in one process: requests and tokens a minute, and parallel sequences.
Pure.

A limit of L a minute is a bucket that drains at L / 60 a second and holds L (a leaky bucket as a meter):

    spent(t)   what was used and has not drained; never below 0
    held(t)    tokens that running requests may still use; they drain only after they are settled
    free(t)    L - spent(t) - held(t)

`reserve` holds the most tokens that a request may use, and `settle` turns them into what it has used. A request that is
not known to fit is refused, so spent + held exceeds L only by what a request used beyond its reservation; the next ones
wait for that. A process that enforces only a share S of a limit has a bucket of S x L. There a request for more than
the bucket holds, but not more than L, is admitted when nothing is spent or held.

One call costs the same however many keys there are.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from policies.record import record

Limit = Literal["requests", "tokens", "parallel"]

MINUTE_S = 60.0
_ROUNDING = 1e-6
"""Units, far below one: draining by parts leaves rounding errors, which differ from those of Redis."""


@record
class Limits:
    """The limits of one key; None: no limit. Tokens are those of prompts and answers together."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    parallel: int | None = None


@record
class Need:
    """The most that one HTTP request may use: its sequences, and the tokens of its prompts and longest answers."""

    sequences: int
    tokens: int


LEAST = Need(1, 1)
"""The least that any request uses."""


class Refusal(NamedTuple):
    """A request that does not fit. `wait_s` is when it may, or None if it never will: it asks for more than `most`."""

    limit: Limit
    most: int
    used: int
    asked: int
    wait_s: float | None


class Meter(NamedTuple):
    """The state of one limit for the client: what is left, and the seconds until nothing is spent."""

    limit: int
    left: int
    reset_s: float


class Meters(NamedTuple):
    """The states of the limits of requests and of tokens; None: no limit."""

    requests: Meter | None
    tokens: Meter | None


@dataclass(slots=True)
class Bucket:
    """The amount that was spent of a limit and has not drained."""

    spent: float = 0.0
    at_s: float = -math.inf

    def drain(self, per_min: float, now_s: float) -> float:
        """Returns the amount that is left at `now_s`. A clock that goes back drains nothing."""
        if now_s > self.at_s:
            if self.spent:
                self.spent = max(0.0, self.spent - (now_s - self.at_s) * per_min / MINUTE_S)
            self.at_s = now_s
        return self.spent


@dataclass(slots=True)
class Account:
    """The use of one key."""

    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    held: int = 0
    running: int = 0
    """Sequences."""


class Reservation(NamedTuple):
    """The part of a key's limits that a request holds until it is settled."""

    key_id: str
    limits: Limits
    need: Need


class Ledger:
    """The accounts of all keys in this process. Times are of any clock that does not jump."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def refusal(
        self, key_id: str, limits: Limits, need: Need, now_s: float, share: float = 1.0
    ) -> Refusal | None:
        """Returns why a request does not fit now, or None if it does. Changes nothing."""
        account = self._accounts.get(key_id) or Account()
        if limits.parallel is not None:
            most = share_of(limits.parallel, share)
            if account.running + need.sequences > most and (
                account.running or need.sequences > limits.parallel
            ):
                never = need.sequences > limits.parallel
                # a sequence that ends makes room, at a time that nobody knows
                wait_s = None if never else 1.0
                return Refusal("parallel", limits.parallel, account.running, need.sequences, wait_s)
        if limits.requests_per_min is not None:
            refused = _fits("requests", limits.requests_per_min, account.requests, 0, 1, now_s, share)
            if refused is not None:
                return refused
        if limits.tokens_per_min is not None:
            return _fits(
                "tokens", limits.tokens_per_min, account.tokens, account.held, need.tokens, now_s, share
            )
        return None

    def reserve(
        self, key_id: str, limits: Limits, need: Need, now_s: float, share: float = 1.0
    ) -> Reservation | Refusal:
        """Holds what a request may use, or returns why it does not fit."""
        refused = self.refusal(key_id, limits, need, now_s, share)
        if refused is not None:
            return refused
        account = self._accounts.setdefault(key_id, Account())
        if limits.requests_per_min is not None:
            account.requests.drain(limits.requests_per_min * share, now_s)
            account.requests.spent += 1
        account.held += need.tokens
        account.running += need.sequences
        return Reservation(key_id, limits, need)

    def settle(self, held: Reservation, used_tokens: int, now_s: float, share: float = 1.0) -> None:
        """Ends a reservation, of which `used_tokens` were used; call exactly once."""
        account = self._accounts[held.key_id]
        account.held -= held.need.tokens
        account.running -= held.need.sequences
        if held.limits.tokens_per_min is not None:
            account.tokens.drain(held.limits.tokens_per_min * share, now_s)
            account.tokens.spent += used_tokens

    def meters(self, key_id: str, limits: Limits, now_s: float, share: float = 1.0) -> Meters:
        """Returns the states of a key's limits."""
        account = self._accounts.get(key_id) or Account()
        return Meters(
            _meter(limits.requests_per_min, account.requests, 0, now_s, share),
            _meter(limits.tokens_per_min, account.tokens, account.held, now_s, share),
        )

    def account(self, key_id: str) -> Account | None:
        """Returns the use of a key, or None if it has used nothing."""
        return self._accounts.get(key_id)

    def forget(self, key_ids: set[str]) -> None:
        """Drops the accounts of keys that are not among `key_ids` and have nothing running."""
        for key_id in [
            k for k, account in self._accounts.items() if k not in key_ids and not account.running
        ]:
            del self._accounts[key_id]


def never_fits(limits: Limits, need: Need) -> Refusal | None:
    """Returns why a request fits no account with these limits, however empty it is, or None if it fits an empty one."""
    return Ledger().refusal("", limits, need, 0.0)


def share_of(limit: int, share: float) -> int:
    """Returns the whole part of a limit that a process with this share of it enforces, which is 1 at least."""
    # a share of 1/3 is a little below or above it as a float, which must not cost a whole unit
    return max(1, math.floor(limit * share + 1e-9))


def _whole(spent: float) -> int:
    """Returns the units that are spent, a begun one as a whole one."""
    return max(0, math.ceil(spent - _ROUNDING))


def _fits(
    limit: Limit, most: int, bucket: Bucket, held: int, asked: int, now_s: float, share: float
) -> Refusal | None:
    spent = bucket.drain(most * share, now_s)
    size = max(1.0, most * share)
    if asked > most:
        return Refusal(limit, most, _whole(spent) + held, asked, None)
    wanted = min(asked, size)
    over = spent + held + wanted - size
    if over <= _ROUNDING:
        return None
    # where what is held stands in the way too, the wait is a guess: when all that is spent has drained
    wait_s = min(over, spent) * MINUTE_S / (most * share)
    return Refusal(limit, most, _whole(spent) + held, asked, max(wait_s, 0.001))


def _meter(most: int | None, bucket: Bucket, held: int, now_s: float, share: float) -> Meter | None:
    if most is None:
        return None
    spent = bucket.drain(most * share, now_s)
    size = max(1.0, most * share)
    left = max(0, math.floor(size - spent - held + 1e-6))
    return Meter(most, left, spent * MINUTE_S / (most * share))
