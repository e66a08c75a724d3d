"""The prefill side of a KV transfer in the sim engine: leases by attempt, their expiry, and the engines that read them.

The rules of a lease's life are pure (`policies.engine_model.leases`). This module adds a timer, the attempts' ids, and
the connections of the decode engines: a Pull protects a lease until Pulled, or until its connection is lost.
"""

import asyncio
import math
from collections.abc import Callable, Mapping

from actors.engine.leases import AttemptLeases
from actors.engine.sim.links import LinkPacer
from actors.wire.channel import Channel, WireError
from actors.wire.messages import Message, Pull, PullChunk, Pulled, PullGrant, Sent
from policies.engine_model.blocks import Allocation
from policies.engine_model.leases import Lease, LeaseTable


class LeaseKeeper:
    """The leases of one engine. `free(allocation)` is called exactly once for each allocation that was granted."""

    def __init__(
        self,
        lease_s: float,
        key_prefix: str,
        bytes_of: Callable[[int], int],
        free: Callable[[Allocation], None],
        pacers: Mapping[str, LinkPacer],
    ) -> None:
        """Makes an empty table. `key_prefix` is unique for this process, `bytes_of(tokens)` returns the size of their
        KV, and `pacers` are the links of each node of the engine, over which its KV is sent.
        """
        self.expired = 0
        self._table = LeaseTable(lease_s)
        self._prefix = key_prefix
        self._bytes_of = bytes_of
        self._free = free
        self._granted = 0
        self._held = AttemptLeases()
        self._reads: dict[Channel, set[str]] = {}
        self._pacers = pacers
        # by key
        self._nodes: dict[str, str] = {}
        self._readers: dict[str, Channel] = {}  # by key, for paced reads only
        # the parts on their way of each lease
        self._parts: dict[str, set[str]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._table)

    def stop(self) -> None:
        """Stops all timers, so that no lease expires and nothing is sent any more."""
        if self._timer is not None:
            self._timer.cancel()

    # ------------------------------------------------------------------------------------------------ by request

    def grant(self, attempt_id: str, allocation: Allocation, tokens: int, node: str) -> str:
        """Leases the KV of `attempt_id`, which lies on `node`, and returns the key by which it is pulled."""
        self._granted += 1
        key = f"{self._prefix}/{self._granted}"
        self._nodes[key] = node
        self._table.grant(key, allocation, tokens, self._loop.time())
        self._held.granted(attempt_id, key)
        self._set_timer()
        return key

    def batch(self, step: int) -> str:
        """Returns a name for the prefills that end with the engine's step of this number, unique across its lives."""
        return f"{self._prefix}@{step}"

    def release(self, attempt_id: str) -> None:
        """Ends the leases of `attempt_id`: at once, or when the running read of their KV has ended."""
        for key, _ in self._held.of(attempt_id):
            self._ended(self._table.release(key))

    def holds(self, attempt_id: str) -> bool:
        """Whether there is a lease of `attempt_id`."""
        return bool(self._held.of(attempt_id))

    def renew(self, attempt_id: str, lease_s: float) -> float:
        """Makes the leases of `attempt_id` last for `lease_s` from now on. Returns the seconds that are left of the
        last one, or 0 if there is none.
        """
        now_s = self._loop.time()
        left = [self._table.renew(key, lease_s, now_s) or 0.0 for key, _ in self._held.of(attempt_id)]
        return left[-1] if left else 0.0

    def expire_all(self) -> None:
        """Ends every lease that nobody reads, as if its time were over."""
        self._expire(math.inf)

    # ------------------------------------------------------------------------------------------------ by key

    def begin_read(self, key: str) -> bool:
        """Protects the lease from ending. Returns False if it has ended already."""
        return self._table.begin_read(key) is not None

    def end_read(self, key: str) -> None:
        """Frees the KV, because its read has ended or will never begin."""
        self._ended(self._table.end_read(key))

    # ------------------------------------------------------------------------------------------------ other engines

    def message(self, channel: Channel, message: Message) -> None:
        """Takes a Pull, PullChunk or Pulled of a decode engine. Raises WireError for any other message."""
        if isinstance(message, Pull):
            reads = self._reads.setdefault(channel, set())
            lease = None if message.attempt_id in reads else self._table.begin_read(message.attempt_id)
            if lease is None:
                channel.send(PullGrant(message.attempt_id, ok=False))
                return
            reads.add(message.attempt_id)
            reader = channel.peer.id if channel.peer is not None else ""
            if message.chunked:
                paced = self._pacers[self._nodes[lease.key]].fits(reader)
            else:
                paced = message.n_bytes > 0 and self._begin(
                    message.attempt_id, message.attempt_id, 0, reader, message.n_bytes
                )
            if paced:
                self._readers[message.attempt_id] = channel
            channel.send(PullGrant(message.attempt_id, True, self._bytes_of(lease.tokens), paced))
        elif isinstance(message, PullChunk):
            reader = channel.peer.id if channel.peer is not None else ""
            part = f"{message.attempt_id}+{message.chunk}"
            if message.attempt_id in self._readers and message.n_bytes > 0:
                self._begin(part, message.attempt_id, message.chunk, reader, message.n_bytes)
        elif isinstance(message, Pulled):
            reads = self._reads.get(channel, set())
            if message.attempt_id in reads:
                reads.remove(message.attempt_id)
                self._unpace(message.attempt_id)
                self.end_read(message.attempt_id)
            else:
                self._ended(self._table.release(message.attempt_id))
        else:
            raise WireError(f"an engine sends Pull, PullChunk and Pulled, not {type(message).__name__}")

    def closed(self, channel: Channel) -> None:
        """Ends all reads over the lost connection of a decode engine."""
        for key in sorted(self._reads.pop(channel, ())):
            self._unpace(key)
            self._ended(self._table.reader_lost(key, self._loop.time()))
        self._set_timer()

    # ------------------------------------------------------------------------------------------------ internals

    def _begin(self, part: str, key: str, chunk: int, reader: str, n_bytes: int) -> bool:
        """Starts to send a part of the KV under `key`. Returns False if no link fits the reader."""

        def sent(seconds: float) -> None:
            self._parts[key].discard(part)
            self._readers[key].send(Sent(key, seconds, chunk))

        begun = self._pacers[self._nodes[key]].begin(part, reader, n_bytes, sent)
        if begun:
            self._parts.setdefault(key, set()).add(part)
        return begun

    def _unpace(self, key: str) -> None:
        if self._readers.pop(key, None) is None:
            return
        for part in self._parts.pop(key, ()):
            self._pacers[self._nodes[key]].drop(part)

    def _ended(self, lease: Lease | None) -> None:
        if lease is None:
            return
        self._held.ended(lease.key)
        del self._nodes[lease.key]
        if not self._table and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._free(lease.allocation)

    def _set_timer(self) -> None:
        if self._timer is None and (next_s := self._table.next_expiry_s()) is not None:
            self._timer = self._loop.call_at(next_s, self._expire)

    def _expire(self, now_s: float | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for lease in self._table.expire(self._loop.time() if now_s is None else now_s):
            self.expired += 1
            self._ended(lease)
        self._set_timer()
