"""The decode side of a sim engine's KV reads: from the moment that slot and blocks are taken until the KV is there.

    begin -> granted (the prefill engine protects its copy) -> the bytes move, here or paced by the other side -> ended
          -> failed (the copy is gone, its engine does not answer, the link is lost)

A read under way is let end before its blocks are used again, also when its request has gone meanwhile.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from actors.engine.protocol import Sink
from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.leases import LeaseKeeper
from actors.engine.sim.peers import Puller, SimHandle
from actors.engine.sim.requests import DecodeWork
from actors.wire.channel import Identity
from actors.wire.messages import Admitted
from policies.engine_model.scheduler import EngineModel
from policies.engine_model.timing import TimingProfile


class KvReads:
    """The reads of one engine, and their totals. `failed(work, reason)` ends a request whose KV cannot be read, and
    `kick` has the engine look for something to do.
    """

    def __init__(
        self,
        config: SimEngineConfig,
        timing: TimingProfile,
        model: EngineModel,
        failed: Callable[[DecodeWork, str], None],
        kick: Callable[[], None],
    ) -> None:
        self._config, self._timing, self._model = config, timing, model
        self._failed, self._kick = failed, kick
        self._puller = Puller(config.pull_timeout_s)
        self._works: set[DecodeWork] = set()
        self._stopped = False
        self.transfers = self.n_bytes = self.blocks = self.failures = 0
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._works)

    def __contains__(self, work: DecodeWork) -> bool:
        return work in self._works

    def start(self, sink: Sink, leases: LeaseKeeper) -> None:
        """`leases`: the engine's own, whose KV is not pulled."""
        self._sink, self._leases = sink, leases
        self._loop = asyncio.get_running_loop()

    def attach(self, me: Identity) -> None:
        """Who we are towards other engines."""
        self._puller.attach(me)

    def stop(self) -> None:
        """Nothing more is read or answered."""
        self._stopped = True
        self._puller.close()
        for work in self._works:
            if work.transfer is not None:
                work.transfer.cancel()

    # --------------------------------------------------------------------------------------------------- a read

    def begin(self, work: DecodeWork) -> None:
        """Slot and blocks are taken: read the KV."""
        handle = cast(SimHandle, work.handle)
        self._works.add(work)
        if handle.engine_id != self._config.engine_id:
            self._puller.pull(handle, self._bytes_to_read(work), work)
        elif self._leases.begin_read(handle.lease):
            self._loop.call_soon(self.granted, work)
        else:
            self._loop.call_soon(self.failed, work, "this engine does not hold the KV any more")

    def granted(self, work: DecodeWork, paced: bool = False) -> None:
        """The prefill engine protects the KV; the bytes that are not cached here move now. `paced`: it says when they
        have arrived (`sent`)."""
        if self._stopped:
            return
        if work.gone:  # nothing has moved yet
            self._ended(work, 0, 0.0)
            return
        if not paced:
            n_bytes = self._bytes_to_read(work)
            seconds = self._timing.transfer_s(n_bytes)
            work.transfer = self._loop.call_later(
                seconds + self._config.hold_transfers_s, self._ended, work, n_bytes, seconds
            )

    def sent(self, work: DecodeWork, seconds: float) -> None:
        """The bytes have arrived; the prefill engine took `seconds` for them."""
        if not self._stopped and work in self._works:
            n_bytes, hold_s = self._bytes_to_read(work), self._config.hold_transfers_s
            work.transfer = self._loop.call_later(hold_s, self._ended, work, n_bytes, seconds)

    def failed(self, work: DecodeWork, reason: str) -> None:
        """The KV cannot be read, or not to its end."""
        if work not in self._works:
            return  # it was over already
        self._works.discard(work)
        self.failures += 1
        if work.transfer is not None:
            work.transfer.cancel()
        self._model.remove(work.seqs[0])
        if not work.gone:
            self._failed(work, reason)
        self._kick()

    def end_remote(self, handle: SimHandle) -> None:
        """The prefill engine's copy is not needed any more."""
        if handle.engine_id != self._config.engine_id:
            self._puller.end(handle)
        else:
            self._leases.end_read(handle.lease)

    def _bytes_to_read(self, work: DecodeWork) -> int:
        """What of the KV is not cached here."""
        handle = cast(SimHandle, work.handle)
        if handle.engine_id == self._config.engine_id:
            return 0
        return handle.kv_bytes * (handle.tokens - work.seqs[0].cached_tokens) // handle.tokens

    def _ended(self, work: DecodeWork, n_bytes: int, seconds: float) -> None:
        """`seconds` without the hold."""
        handle, seq = cast(SimHandle, work.handle), work.seqs[0]
        self._works.discard(work)
        self.end_remote(handle)
        if work.gone:
            self._model.remove(seq)
        else:
            blocks = self._model.pool.blocks_for(handle.tokens - seq.cached_tokens) if n_bytes else 0
            self.transfers += 1
            self.n_bytes += n_bytes
            self.seconds += seconds
            self.blocks += blocks
            self._model.loaded(seq)
            work.started = True
            self._sink.admitted(Admitted(work.attempt_id, n_bytes, seconds, blocks, seq.cached_tokens))
        self._kick()
