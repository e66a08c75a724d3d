"""Leases on KV that a prefill engine keeps for a decode engine. KV is never freed while somebody reads it.

    held --begin_read--> reading --end_read--> ended
    held --release / expire--> ended
    reading --release--> reading (doomed) --end_read or reader_lost--> ended
    reading --reader_lost--> held (a further decode engine may read) or, past its time, ended

Every lease ends exactly once. The call that ends it returns it, and the caller then frees its blocks.
"""

from collections import OrderedDict
from dataclasses import dataclass

from policies.engine_model.blocks import Allocation


@dataclass(slots=True)
class Lease:
    """KV of `tokens` prompt tokens kept under `key`. A `doomed` lease ends as soon as nobody reads it."""

    key: str
    allocation: Allocation
    tokens: int
    expires_s: float
    readers: int = 0
    doomed: bool = False


class LeaseTable:
    """Leases of equal duration, of which the oldest ends first. Times are on the caller's clock, in seconds."""

    def __init__(self, lease_s: float) -> None:
        if not lease_s > 0:
            raise ValueError(f"lease_s is {lease_s}: it must be above 0")
        self.lease_s = lease_s
        self._leases: OrderedDict[str, Lease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: str) -> bool:
        return key in self._leases

    def grant(self, key: str, allocation: Allocation, tokens: int, now_s: float) -> Lease:
        """Makes a lease that expires after `lease_s`. Raises KeyError if there is a lease under `key` already."""
        if key in self._leases:
            raise KeyError(f"lease {key!r} exists already")
        lease = self._leases[key] = Lease(key, allocation, tokens, now_s + self.lease_s)
        return lease

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
        return None

    def expire(self, now_s: float) -> list[Lease]:
        """Ends and returns the leases that have expired and that nobody reads. A lease that is read ends afterwards."""
        ended = []
        for lease in self._leases.values():
            if lease.expires_s > now_s:
                break
            if lease.readers == 0:
                ended.append(lease)
        for lease in ended:
            del self._leases[lease.key]
        return ended

    def next_expiry_s(self) -> float | None:
        """Returns the time at which the next lease expires that nobody reads; None when there is none."""
        for lease in self._leases.values():
            if lease.readers == 0:
                return lease.expires_s
        return None

    def _doom(self, lease: Lease) -> Lease | None:
        lease.doomed = True
        if lease.readers:
            return None
        del self._leases[lease.key]
        return lease
