"""The sim engine: the engine protocol on a timing model with virtual KV. Real sockets, real queues, no model, no torch.

A clock drives the steps (`sim_clock`). A step's tokens leave in one call. The pure parts are `policies.engine_model`;
what is here is the life of requests around it:

    prefill   queued -> computing -> leased -> (read by a decode engine | released | expired)
    decode    queued -> loading (KV is read from the prefill engine) -> decoding -> finished
    decode    queued -> computing -> decoding -> finished                               (colocated, no handle)

A KV read under way is let end before its blocks are used again, on both sides. The engine that decodes frees the
prefill engine's copy: after the read, and also when the request ends before it. After a retryable Failed the copy is
the ingress' again: it may send the handle to another engine, or release it.
"""

import asyncio
import logging
import os
import time
from typing import Any, Literal, cast

import msgspec

from actors.engine.protocol import EngineMetrics, Sink
from actors.engine.sim_clock import StepClock
from actors.engine.sim_config import SimEngineConfig
from actors.engine.sim_leases import LeaseKeeper
from actors.engine.sim_output import Choice
from actors.engine.sim_peers import Puller, SimHandle
from actors.engine.sim_requests import DecodeWork, PrefillWork, Refused, decode_of
from actors.wire.channel import Channel, Identity
from actors.wire.messages import (
    KV_EVENTS,
    Admitted,
    Decode,
    EngineInfo,
    Failed,
    Message,
    Out,
    Prefill,
    PrefillDone,
    Status,
)
from policies.engine_model import text
from policies.engine_model.blocks import Allocation, BlockPool, Change
from policies.engine_model.scheduler import EngineModel, Sequence, Stage, StepResult

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode


class SimEngine:
    """Implements `actors.engine.protocol.Engine`; `attach`, `peer_message` and `peer_closed` serve its server."""

    def __init__(self, config: SimEngineConfig, clock: StepClock | None = None, rank: int = 0) -> None:
        """`clock` is shared by the ranks of an engine with a step barrier; lease keys begin with the rank."""
        self.config = config
        self._rank = rank
        self._clock = clock or StepClock()
        self._timing = config.timing_profile()
        self._pool = BlockPool(config.kv_blocks, config.block_size_tokens, config.kv_events)
        self._model = EngineModel(
            self._timing, self._pool, config.slots, config.prefill_budget_tokens, config.chunked_prefill
        )
        self._prefills: dict[str, PrefillWork] = {}
        self._decodes: dict[str, DecodeWork] = {}
        self._loads: set[DecodeWork] = set()
        self._puller = Puller(config.pull_timeout_s)
        self._addresses: tuple[str, ...] = ()
        self._draining = False
        self._stopped = False
        self._dead: Exception | None = None
        self._transfers = self._transfer_bytes = self._transfer_blocks = self._transfer_failures = 0
        self._transfer_s = 0.0

    # ------------------------------------------------------------------------------------------------ life

    async def start(self, sink: Sink) -> None:
        """Ready at once: there is nothing to load."""
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._clock.join(self)
        self._leases = LeaseKeeper(
            self.config.lease_s,
            f"{self._rank}.{os.urandom(6).hex()}",
            self._timing.kv_bytes,
            self._free_lease,
            self.config.links,
        )

    def attach(self, me: Identity, addresses: tuple[str, ...]) -> None:
        """Called by the server when it listens: where other engines pull this engine's KV from."""
        self._addresses = addresses
        self._puller.attach(me)

    def info(self) -> EngineInfo:
        """Static facts."""
        config = self.config
        return EngineInfo(
            id=config.engine_id,
            role=config.role,
            kind="sim",
            model=config.model,
            group=config.compatibility_group(),
            addresses=self._addresses,
            slots=config.slots,
            kv_blocks=config.kv_blocks,
            block_size_tokens=config.block_size_tokens,
            max_model_len=config.max_model_len,
            node="",
            pid=os.getpid(),
            lease_s=config.lease_s,
            features=(
                "n",
                "stop",
                "logprobs",
                "prompt_logprobs",
                *((KV_EVENTS,) if config.kv_events else ()),
            ),
        )

    def status(self) -> Status:
        """Counts of this moment; `running` are the sequences that hold a slot. It knows the share of the token budget
        that the step under way uses; nothing is swapped here, and the timing model has no device to be busy.
        """
        model, pool = self._model, self._pool
        return Status(
            engine_id=self.config.engine_id,
            running=model.n_active,
            waiting=model.n_waiting,
            kv_blocks_used=pool.used,
            leases=len(self._leases),
            kv_usage=pool.used / pool.total,
            state="draining" if self._draining else "ready",
            tokens_in_flight=model.kv_tokens,
            token_budget=min(1.0, model.step_tokens / model.budget_tokens),
        )

    def metrics(self) -> EngineMetrics:
        """Totals since start."""
        return EngineMetrics(
            prefill_tokens=self._model.prefill_tokens_total,
            decode_tokens=self._model.decode_tokens_total,
            transfers=self._transfers,
            transfer_bytes=self._transfer_bytes,
            transfer_s=self._transfer_s,
            transfer_descriptors=self._transfer_blocks,
            transfer_failures=self._transfer_failures,
            leases_expired=self._leases.expired,
            kv_blocks_total=self._pool.total,
            kv_blocks_used=self._pool.used,
            kv_blocks_free=self._pool.free,
            preemptions=self._model.preemptions_total,
        )

    def kv_events(self, rank: int = 0) -> list[Change]:
        """Changes of the prefix cache since the last call (option `kv_events`)."""
        return self._pool.drain_changes()

    async def check_health(self) -> None:
        """Raises RuntimeError when the step loop has failed or the engine was stopped."""
        if self._dead is not None:
            raise RuntimeError(f"sim engine {self.config.engine_id} died: {self._dead!r}") from self._dead
        if self._stopped:
            raise RuntimeError(f"sim engine {self.config.engine_id} was stopped")

    async def drain(self, timeout_s: float) -> bool:
        """New work is refused from now on; waits until all work and all leases have ended."""
        self._draining = True
        deadline_s = self._loop.time() + timeout_s
        while self._prefills or self._decodes or self._loads or self._leases:
            if self._loop.time() >= deadline_s:
                return False
            await asyncio.sleep(0.01)
        return True

    async def stop(self) -> None:
        """Ends everything at once, without answers."""
        if self._stopped:
            return
        self._stopped = True
        self._puller.close()
        self._leases.stop()
        works: list[PrefillWork | DecodeWork] = [*self._prefills.values(), *self._decodes.values()]
        for timer in [work.timer for work in works] + [work.transfer for work in self._loads]:
            if timer is not None:
                timer.cancel()

    # ------------------------------------------------------------------------------------------------ requests

    def prefill(self, msg: Prefill) -> None:
        """Queues the prompt; its KV will be leased."""
        try:
            self._check_open(msg.rid in self._prefills)
            work = PrefillWork(self.config, msg, time.monotonic())
        except Refused as error:
            self._sink.failed(error.failed(msg.rid, "prefill"))
            return
        self._leases.release(msg.rid)  # an older copy of the same request is of no use any more
        work.timer = self._loop.call_later(max(0.0, msg.deadline_s), self._prefill_late, work)
        self._prefills[msg.rid] = work
        self._model.add(work.seq)
        self._clock.kick()

    def decode(self, msg: Decode) -> None:
        """Queues a decode, with the KV of another engine (`handle`) or computing all itself."""
        try:
            self._check_open(msg.rid in self._decodes)
            work = DecodeWork(self, msg)
        except Refused as error:
            self._sink.failed(error.failed(msg.rid, "decode"))
            return
        work.timer = self._loop.call_later(max(0.0, msg.deadline_s), self._decode_late, work)
        self._decodes[msg.rid] = work
        self._add_choice(work)
        self._clock.kick()

    def cancel(self, rid: str) -> None:
        """Ends `rid` in whatever stage, its lease included."""
        prefill = self._prefills.get(rid)
        if prefill is not None:
            self._end_prefill(prefill)
            self._model.remove(prefill.seq)
        decode = self._decodes.get(rid)
        if decode is not None:
            self._end_decode(decode)
        self._leases.release(rid)
        self._clock.kick()

    def release(self, rid: str) -> None:
        """Ends the lease of `rid`, if there is one."""
        self._leases.release(rid)

    def _check_open(self, busy: bool) -> None:
        """Raises Refused when nothing, or not this, can be taken now."""
        name = self.config.engine_id
        if self._dead is not None or self._stopped:
            raise Refused("engine_dead", f"engine {name} is dead", retryable=True)
        if self._draining:
            raise Refused("draining", f"engine {name} takes no new work", retryable=True)
        if busy:
            raise Refused("bad_request", f"engine {name} has a request of this id already")

    def _add_choice(self, work: DecodeWork) -> None:
        self._model.add(work.new_choice(self.config.max_model_len, self.config.mean_output_tokens))

    # ------------------------------------------------------------------------------------------------ steps

    def begin_step(self) -> float | None:
        """The clock begins a step."""
        if self._stopped or self._dead is not None:
            return None
        try:
            seconds = self._model.begin_step()
            for seq in self._model.take_admitted():
                self._admitted(seq)
        except Exception as error:
            self._die(error)
            return None
        return seconds

    def end_step(self) -> None:
        """The clock ends the step that it began."""
        if self._stopped or self._dead is not None:
            return
        try:
            result = self._model.end_step()
            items = self._items(result) if result.decoded else []
            for seq in result.prefilled:
                self._prefilled(seq)
            if items:
                self._sink.tokens(items)
        except Exception as error:
            self._die(error)

    def _items(self, result: StepResult) -> list[Out]:
        """The pieces of all sequences that gained a token. The engine's hottest loop: plain words are made inline."""
        for seq in result.finished:
            cast(Choice, seq.owner).ends()
        last, words = self._model.steps - 1, text.WORDS
        stride, mix, mask = text.TOKEN_STRIDE, text.TOKEN_MIX, text.MASK32
        items: list[Out] = []
        append = items.append
        ended: list[Sequence] = []
        for seq in result.decoded:
            choice: Any = seq.owner
            i = last - seq.offset
            if choice.special:
                out = choice.piece(i)
                append(out)
                if out.finish is not None:
                    ended.append(seq)
            else:
                x = (choice.start + i * stride) & mask
                append(Out(choice.rid, words[(x ^ x >> 15) * mix >> 26 & 63], 1, choice.index))
            if i == 0 and choice.params.n > len(choice.request.seqs):
                for _ in range(1, choice.params.n):  # now that the prompt's blocks are here to be shared
                    self._add_choice(choice.request)
        for seq in ended:
            self._choice_ended(seq)
        return items

    def _choice_ended(self, seq: Sequence) -> None:
        self._model.remove(seq)
        work = decode_of(seq)
        work.left -= 1
        if work.left == 0:
            self._forget_decode(work)

    def _admitted(self, seq: Sequence) -> None:
        if seq.prefill_only:
            cast(PrefillWork, seq.owner).admitted_s = time.monotonic()
            return
        work = decode_of(seq)
        if seq.stage is Stage.LOADING:
            self._load(work)
        elif not work.started:
            work.started = True
            self._sink.admitted(Admitted(work.rid, cached_tokens=seq.cached_tokens))

    def _die(self, error: Exception) -> None:
        """The step loop failed, which is a bug: nothing can go on here."""
        log.error("sim engine %s died", self.config.engine_id, exc_info=error)
        self._dead = error
        message = f"engine {self.config.engine_id} died: {error!r}"
        for prefill in list(self._prefills.values()):
            self._end_prefill(prefill)
            self._fail(prefill.rid, "prefill", "engine_dead", message, True)
        for decode in list(self._decodes.values()):
            self._forget_decode(decode)
            self._fail(decode.rid, "decode", "engine_dead", message, True)

    # ------------------------------------------------------------------------------------------------ ends

    def _fail(
        self, rid: str, stage: Literal["prefill", "decode"], code: str, message: str, retryable: bool
    ) -> None:
        self._sink.failed(Failed(rid, stage, code, message, retryable))

    def _end_prefill(self, work: PrefillWork) -> None:
        del self._prefills[work.rid]
        if work.timer is not None:
            work.timer.cancel()

    def _prefill_late(self, work: PrefillWork) -> None:
        self._end_prefill(work)
        self._model.remove(work.seq)
        self._fail(work.rid, "prefill", "deadline", "the deadline passed before the prefill was done", False)
        self._clock.kick()

    def _decode_late(self, work: DecodeWork) -> None:
        self._end_decode(work)
        self._fail(work.rid, "decode", "deadline", "the deadline passed before the last token", False)
        self._clock.kick()

    def _forget_decode(self, work: DecodeWork) -> None:
        work.gone = True
        del self._decodes[work.rid]
        if work.timer is not None:
            work.timer.cancel()

    def _end_decode(self, work: DecodeWork) -> None:
        """Ends it before its time; frees slot and blocks here and the copy there, after a read that is under way."""
        self._forget_decode(work)
        if work in self._loads:
            return  # `_load_ended` does the rest
        for seq in work.seqs:
            self._model.remove(seq)
        if work.handle is not None and not work.started:
            self._end_remote(work.handle)

    # ------------------------------------------------------------------------------------------------ KV reads (decode)

    def _load(self, work: DecodeWork) -> None:
        """Slot and blocks are taken: read the KV."""
        handle = cast(SimHandle, work.handle)
        self._loads.add(work)
        if handle.engine_id != self.config.engine_id:
            self._puller.pull(handle, self._bytes_to_read(work), work)
        elif self._leases.begin_read(handle.lease):
            self._loop.call_soon(self.read_granted, work)
        else:
            self._loop.call_soon(self.read_failed, work, "this engine does not hold the KV any more")

    def _bytes_to_read(self, work: DecodeWork) -> int:
        """What of the KV is not cached here."""
        handle = cast(SimHandle, work.handle)
        if handle.engine_id == self.config.engine_id:
            return 0
        return handle.kv_bytes * (handle.tokens - work.seqs[0].cached_tokens) // handle.tokens

    def read_granted(self, work: DecodeWork, paced: bool = False) -> None:
        """The prefill engine protects the KV; the bytes that are not cached here move now. `paced`: it says when they
        have arrived (`read_sent`)."""
        if self._stopped:
            return
        if work.gone:  # nothing has moved yet
            self._load_ended(work, 0, 0.0)
            return
        if not paced:
            n_bytes = self._bytes_to_read(work)
            seconds = self._timing.transfer_s(n_bytes)
            work.transfer = self._loop.call_later(
                seconds + self.config.hold_transfers_s, self._load_ended, work, n_bytes, seconds
            )

    def read_sent(self, work: DecodeWork, seconds: float) -> None:
        """The bytes have arrived; the prefill engine took `seconds` for them."""
        if not self._stopped and work in self._loads:
            n_bytes, hold_s = self._bytes_to_read(work), self.config.hold_transfers_s
            work.transfer = self._loop.call_later(hold_s, self._load_ended, work, n_bytes, seconds)

    def _load_ended(self, work: DecodeWork, n_bytes: int, seconds: float) -> None:
        """`seconds` without the hold."""
        handle, seq = cast(SimHandle, work.handle), work.seqs[0]
        self._loads.discard(work)
        self._end_remote(handle)
        if work.gone:
            self._model.remove(seq)
        else:
            blocks = self._pool.blocks_for(handle.tokens - seq.cached_tokens) if n_bytes else 0
            self._transfers += 1
            self._transfer_bytes += n_bytes
            self._transfer_s += seconds
            self._transfer_blocks += blocks
            self._model.loaded(seq)
            work.started = True
            self._sink.admitted(Admitted(work.rid, n_bytes, seconds, blocks, seq.cached_tokens))
        self._clock.kick()

    def read_failed(self, work: DecodeWork, reason: str) -> None:
        """The KV cannot be read, or not to its end."""
        if work not in self._loads:
            return  # it was over already
        self._loads.discard(work)
        self._transfer_failures += 1
        if work.transfer is not None:
            work.transfer.cancel()
        self._model.remove(work.seqs[0])
        if not work.gone:
            self._forget_decode(work)
            self._fail(work.rid, "decode", "kv_load", reason, True)
        self._clock.kick()

    def _end_remote(self, handle: SimHandle) -> None:
        if handle.engine_id != self.config.engine_id:
            self._puller.end(handle)
        else:
            self._leases.end_read(handle.lease)

    # ------------------------------------------------------------------------------------------------ leases (prefill)

    def _prefilled(self, seq: Sequence) -> None:
        work = cast(PrefillWork, seq.owner)
        self._end_prefill(work)
        assert seq.allocation is not None
        key = self._leases.grant(work.rid, seq.allocation, seq.prompt_tokens)
        kv_bytes = self._timing.kv_bytes(seq.prompt_tokens)
        handle = SimHandle(
            self.config.engine_id, self._addresses, key, seq.allocation.blocks, kv_bytes, seq.prompt_tokens,
            work.prompt_hash,
        )  # fmt: skip
        queue_s, compute_s = work.admitted_s - work.received_s, time.monotonic() - work.admitted_s
        self._sink.prefill_done(
            PrefillDone(
                work.rid, _encode(handle), seq.prompt_tokens, seq.cached_tokens, self.config.lease_s, queue_s,
                compute_s, kv_bytes,
            )
        )  # fmt: skip

    def _free_lease(self, allocation: Allocation) -> None:
        self._pool.release(allocation)
        self._clock.kick()

    # ------------------------------------------------------------------------------------------------ other engines

    def peer_message(self, channel: Channel, message: Message) -> None:
        """A message of a decode engine. Raises WireError when it is none of Pull, Pulled."""
        self._leases.message(channel, message)

    def peer_closed(self, channel: Channel) -> None:
        """A decode engine's connection is gone, and its reads with it."""
        self._leases.closed(channel)
