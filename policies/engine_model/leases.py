"""Leases on KV that a prefill engine keeps for a decode engine. KV is never freed while somebody reads it.

    held --renew--> held, until later
    held --begin_read--> reading --end_read--> ended
    held --release / expire--> ended
    reading --release--> reading (doomed) --end_read or reader_lost--> ended
    reading --reader_lost--> held (a further decode engine may read) or, past its time, ended

Every lease ends exactly once. The call that ends it returns it, and the caller then frees its blocks.

A request may wait for a decode slot for longer than a lease, so its ingress has the lease renewed as long as it waits
(`policies.request.life`). The lender decides by `renewal_s`, which bounds what it lends: no lease lasts longer than
`max_lease_s` in all, and while prompts wait at an engine whose KV is full, the oldest leases are not renewed, as many
as hold what is too much (`tokens_too_many`). Such a lease then runs out; the router places the entry before all others
when it is overdue (`PoolEntry.overdue_from_s`), and rescues it at last. The last renewal is longer than the others, so
that this takes effect well before the end.
"""

import heapq
import itertools
from dataclasses import dataclass

from policies.engine_model.blocks import Allocation

# ASSUMPTION: as long as a request may take in all by default (`app.ingress.config`), so that a lease outlasts the wait
# of a request that can still be answered.
MAX_LEASE_S = 600.0
"""The default of `max_lease_s`, the longest time for which an engine lends the KV of one prompt."""

# ASSUMPTION: above the router's `kv_high_water` of 0.9, which stops new prompts first: an engine refuses renewals only
# where that was not enough.
FULL_KV = 0.95
"""Share of an engine's KV above which it lets its oldest leases end while prompts wait for their turn."""


# ASSUMPTION: with the router's rule that an entry is overdue after two thirds of a lease, this leaves a ninth of
# `max_lease_s` to place the entry before all others, about a minute by default.
LAST_TERM_FROM = 2.0 / 3.0
"""The share of `max_lease_s` after which a renewal lends the KV for all the time that is left."""


def tokens_too_many(kv_usage: float, kv_tokens: int, waiting: int) -> float:
    """Returns the KV in tokens that leases must give back, because prompts wait at a full engine; 0 if none must.

    `kv_usage` is the share of the `kv_tokens` of the engine, or of one of its ranks, that is in use, with leases;
    `waiting` is the number of prompts that wait there.
    """
    return max(0.0, kv_usage - FULL_KV) * kv_tokens if waiting else 0.0


def renewal_s(lease_s: float, max_lease_s: float, age_s: float, is_to_end: bool = False) -> float | None:
    """Returns for how long a lease may last from now on, or None if it may not be renewed.

    `lease_s` is the duration that the engine grants at once, and `age_s` the time since it first granted this lease.
    `is_to_end`: leases must give back KV (`tokens_too_many`), and those that are older hold less than that.
    """
    if is_to_end:
        return None
    left_s = max_lease_s - age_s
    if left_s <= 0:
        return None
    return left_s if age_s >= LAST_TERM_FROM * max_lease_s else min(lease_s, left_s)


@dataclass(slots=True)
class Lease:
    """KV of `tokens` prompt tokens kept under `key`. A `doomed` lease ends as soon as nobody reads it."""

    key: str
    allocation: Allocation
    tokens: int
    granted_s: float
    expires_s: float
    readers: int = 0
    doomed: bool = False


class LeaseTable:
    """Leases that are granted for equal durations and may be renewed. Times are on the caller's clock, in seconds."""

    def __init__(self, lease_s: float) -> None:
        if not lease_s > 0:
            raise ValueError(f"lease_s is {lease_s}: it must be above 0")
        self.lease_s = lease_s
        self._leases: dict[str, Lease] = {}
        # heap of (end, number, key); an item is outdated once its lease has ended, is read or ends at another time
        self._ends: list[tuple[float, int, str]] = []
        self._noted = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: str) -> bool:
        return key in self._leases

    def grant(self, key: str, allocation: Allocation, tokens: int, now_s: float) -> Lease:
        """Makes a lease that expires after `lease_s`. Raises KeyError if there is a lease under `key` already."""
        if key in self._leases:
            raise KeyError(f"lease {key!r} exists already")
        lease = self._leases[key] = Lease(key, allocation, tokens, now_s, now_s + self.lease_s)
        self._note(lease)
        return lease

    def age_s(self, key: str, now_s: float) -> float:
        """Returns the time since a lease was first granted; 0 for a lease that has ended."""
        lease = self._leases.get(key)
        return 0.0 if lease is None else now_s - lease.granted_s

    def older_tokens(self, key: str) -> int:
        """Returns the tokens of all leases that were granted before the lease `key`."""
        older = itertools.takewhile(lambda lease: lease.key != key, self._leases.values())
        return sum([lease.tokens for lease in older])

    def renew(self, key: str, lease_s: float, now_s: float) -> float | None:
        """Makes a lease last for `lease_s` from now on, unless it lasts longer already. Returns the seconds that are
        left of it, or None if it has ended, is doomed, or should have ended by now.
        """
        lease = self._leases.get(key)
        if lease is None or lease.doomed or (lease.expires_s <= now_s and lease.readers == 0):
            return None
        if now_s + lease_s > lease.expires_s:
            lease.expires_s = now_s + lease_s
            self._note(lease)
        return lease.expires_s - now_s

    def begin_read(self, key: str) -> Lease | None:
        """Lets a reader start and returns the lease. None means that it has ended or is doomed and must not be read."""
        lease = self._leases.get(key)
        if lease is None or lease.doomed:
            return None
        lease.readers += 1
        return lease

    def end_read(self, key: str) -> Lease | None:
        """Notes that a reader has finished. The lease then ends and is returned; while others read, it is doomed
        instead, and None is returned.
        """
        lease = self._leases.get(key)
        if lease is None:
            return None
        lease.readers = max(0, lease.readers - 1)
        return self._doom(lease)

    def release(self, key: str) -> Lease | None:
        """Gives a lease back. It ends at once and is returned; while somebody reads, it is doomed instead, and None is
        returned. Unknown keys are no error.
        """
        lease = self._leases.get(key)
        return None if lease is None else self._doom(lease)

    def reader_lost(self, key: str, now_s: float) -> Lease | None:
        """Notes that a reader vanished without `end_read`. Returns the lease if it ends now, because it was doomed or
        has expired and nobody else reads it.
        """
        lease = self._leases.get(key)
        if lease is None:
            return None
        lease.readers = max(0, lease.readers - 1)
        if lease.doomed or lease.expires_s <= now_s:
            return self._doom(lease)
        self._note(lease)
        return None

    def expire(self, now_s: float) -> list[Lease]:
        """Ends and returns the leases that have expired and that nobody reads, in the order of their ends. A lease that
        is read ends afterwards.
        """
        ended = []
        while (next_s := self.next_expiry_s()) is not None and next_s <= now_s:
            ended.append(self._leases.pop(heapq.heappop(self._ends)[2]))
        return ended

    def next_expiry_s(self) -> float | None:
        """Returns the time at which the next lease expires that nobody reads; None when there is none."""
        while self._ends:
            end_s, _, key = self._ends[0]
            lease = self._leases.get(key)
            if lease is not None and lease.readers == 0 and lease.expires_s == end_s:
                return end_s
            heapq.heappop(self._ends)
        return None

    def _note(self, lease: Lease) -> None:
        self._noted += 1
        heapq.heappush(self._ends, (lease.expires_s, self._noted, lease.key))
        if len(self._ends) > 64 + 4 * len(self._leases):  # most are outdated
            self._ends = [(held.expires_s, n, held.key) for n, held in enumerate(self._leases.values())]
            heapq.heapify(self._ends)

    def _doom(self, lease: Lease) -> Lease | None:
        lease.doomed = True
        if lease.readers:
            return None
        del self._leases[lease.key]
        return lease
