"""The prefill side of a KV transfer in the sim engine: leases by request, their expiry, and who reads which.

The rules of a lease's life are pure (`policies.engine_model.leases`); here they get a timer, request ids, and the
connections of the decode engines: a Pull protects a lease until Pulled, or until that connection is lost.
"""

import asyncio
from collections.abc import Callable, Mapping

from actors.engine.sim_links import LinkPacer, SimLink
from actors.wire.channel import Channel, WireError
from actors.wire.messages import Message, Pull, Pulled, PullGrant, Sent
from policies.engine_model.blocks import Allocation
from policies.engine_model.leases import Lease, LeaseTable


class LeaseKeeper:
    """Leases of one engine. `free(allocation)` is called exactly once for each allocation that was granted."""

    def __init__(
        self,
        lease_s: float,
        key_prefix: str,
        bytes_of: Callable[[int], int],
        free: Callable[[Allocation], None],
        links: Mapping[str, SimLink],
    ) -> None:
        """`key_prefix` is unique for this process; `bytes_of(tokens)` gives the KV's size; `links`: see `sim_links`."""
        self.expired = 0
        self._table = LeaseTable(lease_s)
        self._prefix = key_prefix
        self._bytes_of = bytes_of
        self._free = free
        self._granted = 0
        self._key_of: dict[str, str] = {}  # rid -> its newest lease
        self._rid_of: dict[str, str] = {}
        self._reads: dict[Channel, set[str]] = {}
        self._pacer = LinkPacer(dict(links), self._sent)
        self._readers: dict[str, Channel] = {}  # of paced reads
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._table)

    def stop(self) -> None:
        """No lease expires any more, and nothing is sent."""
        self._pacer.stop()
        if self._timer is not None:
            self._timer.cancel()

    # ------------------------------------------------------------------------------------------------ by request

    def grant(self, rid: str, allocation: Allocation, tokens: int) -> str:
        """Leases the KV of `rid`; the key under which it is pulled."""
        self._granted += 1
        key = f"{self._prefix}/{self._granted}"
        self._table.grant(key, allocation, tokens, self._loop.time())
        self._key_of[rid] = key
        self._rid_of[key] = rid
        self._set_timer()
        return key

    def release(self, rid: str) -> None:
        """Ends the lease of `rid`, if it has one: now, or when the read under way has ended."""
        key = self._key_of.get(rid)
        if key is not None:
            self._ended(self._table.release(key))

    # ------------------------------------------------------------------------------------------------ by key

    def begin_read(self, key: str) -> bool:
        """Protects the lease from ending; False if it has ended."""
        return self._table.begin_read(key) is not None

    def end_read(self, key: str) -> None:
        """The read has ended, or will never begin: the KV is freed."""
        self._ended(self._table.end_read(key))

    # ------------------------------------------------------------------------------------------------ other engines

    def message(self, channel: Channel, message: Message) -> None:
        """A Pull or Pulled of a decode engine. Raises WireError for anything else."""
        if isinstance(message, Pull):
            reads = self._reads.setdefault(channel, set())
            lease = None if message.rid in reads else self._table.begin_read(message.rid)
            if lease is None:
                channel.send(PullGrant(message.rid, ok=False))
                return
            reads.add(message.rid)
            reader = channel.peer.id if channel.peer is not None else ""
            paced = message.n_bytes > 0 and self._pacer.begin(message.rid, reader, message.n_bytes)
            if paced:
                self._readers[message.rid] = channel
            channel.send(PullGrant(message.rid, True, self._bytes_of(lease.tokens), paced))
        elif isinstance(message, Pulled):
            reads = self._reads.get(channel, set())
            if message.rid in reads:
                reads.remove(message.rid)
                self._unpace(message.rid)
                self.end_read(message.rid)
            else:
                self._ended(self._table.release(message.rid))
        else:
            raise WireError(f"an engine sends Pull and Pulled, not {type(message).__name__}")

    def closed(self, channel: Channel) -> None:
        """The connection of a decode engine is lost, and with it all reads over it."""
        for key in sorted(self._reads.pop(channel, ())):
            self._unpace(key)
            self._ended(self._table.reader_lost(key, self._loop.time()))
        self._set_timer()

    # ------------------------------------------------------------------------------------------------ internals

    def _sent(self, key: str, seconds: float) -> None:
        self._readers.pop(key).send(Sent(key, seconds))

    def _unpace(self, key: str) -> None:
        if self._readers.pop(key, None) is not None:
            self._pacer.drop(key)

    def _ended(self, lease: Lease | None) -> None:
        if lease is None:
            return
        rid = self._rid_of.pop(lease.key)
        if self._key_of.get(rid) == lease.key:
            del self._key_of[rid]
        if not self._table and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._free(lease.allocation)

    def _set_timer(self) -> None:
        if self._timer is None and (next_s := self._table.next_expiry_s()) is not None:
            self._timer = self._loop.call_at(next_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for lease in self._table.expire(self._loop.time()):
            self.expired += 1
            self._ended(lease)
        self._set_timer()
