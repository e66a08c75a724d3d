"""The sim engine: it has real sockets and queues, but virtual KV and a timing model in place of a model and torch.

A clock (`clock`) drives the steps, and the tokens of a step leave in one call. The pure parts are in
`policies.engine_model`. This module holds the life of the tasks, in the stages of the attempt that they serve:

    prefill   PREFILLING (waits for a slot, computes) -> POOLED (leased) -> pulled, released or expired
    decode    TRANSFERRING (waits for a slot, reads the KV of the prefill engine) -> DECODING -> DONE
    decode    PREFILLING (no handle: computes the prompt itself, colocated) -> DECODING -> DONE

A KV read (`reads`) that has begun always runs to its end before its blocks are used again, on both sides. The engine
that decodes frees the prefill engine's copy after the read, and also if the request ends before the read. After a
retryable Failed the ingress owns the copy again: it may send the handle to another engine, or release it.

The file is long because these transitions are one state machine, which reads best in one place.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import cast

import msgspec

from actors.engine.protocol import EngineMetrics, Sink
from actors.engine.sim.clock import StepClock
from actors.engine.sim.collectives import Collectives
from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.faults import Faults
from actors.engine.sim.flow import FlowMover
from actors.engine.sim.layers import LayerClock
from actors.engine.sim.leases import LeaseKeeper
from actors.engine.sim.links import LinkPacer
from actors.engine.sim.output import Choice, pieces
from actors.engine.sim.peers import Puller, SimHandle
from actors.engine.sim.prefix import PrefixReads
from actors.engine.sim.reads import KvReads
from actors.engine.sim.step_watch import StepWatch
from actors.engine.sim.tasks import DecodeTask, PrefillTask, Refused, decode_of
from actors.wire.channel import Channel, Identity
from actors.wire.messages import (
    Admitted,
    Decode,
    EngineInfo,
    EngineState,
    Failed,
    KVRenewed,
    Message,
    Out,
    Prefill,
    PrefillDone,
    Reading,
    Role,
    Status,
)
from policies.engine_model.blocks import Allocation, BlockPool, Change
from policies.engine_model.scheduler import EngineModel, Sequence, SequenceStage, StepResult
from policies.flow.stages import home_of
from policies.request.attempts import request_id_of
from policies.request.stage import Task

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode


class SimEngine:
    """Implements `actors.engine.protocol.Engine`, and `server.PeerEngine` for other engines' KV reads."""

    def __init__(self, config: SimEngineConfig, clock: StepClock | None = None, rank: int = 0) -> None:
        """Makes rank `rank` of an engine; lease keys begin with the rank. `clock` is shared by the ranks of an engine
        with a step barrier.
        """
        self.config = config
        self._rank = rank
        self._clock = clock or (LayerClock(config.layer_groups) if config.staged else StepClock())
        self._timing = config.timing_profile()
        self._pool = BlockPool(config.kv_blocks, config.block_size_tokens, config.kv_events)
        self._model = EngineModel(
            self._timing, self._pool, config.slots, config.prefill_budget_tokens, config.chunked_prefill
        )
        self._prefills: dict[str, PrefillTask] = {}
        self._decodes: dict[str, DecodeTask] = {}
        self._puller = Puller(config.pull_timeout_s)
        self._mover = FlowMover(config)
        gated = config.collectives_by_permit
        self._exchanger = self._mover if gated else FlowMover(config, permits=False)
        self._reads = KvReads(
            config, self._timing, self._model, self._puller, self._mover, self._read_failed, self._clock.kick
        )
        self._prefixes = PrefixReads(
            config, self._timing, self._model, self._puller, self._mover, self._queue_prefill
        )
        # the step under way: the name of its batch, and the seconds that it computes
        self._batch, self._step_s = "", 0.0
        self._addresses: tuple[str, ...] = ()
        self._draining = False
        self._stopped = False
        self._dead: Exception | None = None
        self._role = config.role
        self._faults: Faults | None = None
        if config.faults is not None:
            self._faults = Faults(config.faults, config.engine_id, self._ordered)
        limits = config.stall_limits()
        halted = None if self._faults is None else self._halted
        self._watch = StepWatch(config.engine_id, self._clock, limits, halted, self._clock.kick)

    @property
    def step_began_s(self) -> float:
        """The beginning of the present step, or of the last one, in seconds of the machine's monotonic clock."""
        return self._clock.step_began_s

    # ------------------------------------------------------------------------------------------------ life

    async def start(self, sink: Sink) -> None:
        """Joins the step clock. The engine is ready at once, because there is nothing to load."""
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._clock.join(self)
        self._pacers = {node: LinkPacer(self.config.links) for node in self.config.nodes}
        self._leases = LeaseKeeper(
            self.config.lease_s,
            f"{self._rank}.{os.urandom(6).hex()}",
            self._timing.kv_bytes,
            self._free_lease,
            self._pacers,
        )
        self._collectives = Collectives(self.config, self._timing, self._exchanger, self._pacers)
        self._reads.start(sink, self._leases)
        if self._faults is not None:
            self._faults.start()
        self._watch.start()

    def attach(self, me: Identity, addresses: tuple[str, ...]) -> None:
        """Takes this engine's name on the wire and the addresses at which other engines can pull its KV. The server
        calls it when it listens.
        """
        self._addresses = addresses
        self._puller.attach(me)
        for mover in {self._mover, self._exchanger}:
            mover.attach(me)

    def info(self) -> EngineInfo:
        """Returns the facts about this engine, of which only the role changes while it runs."""
        return self.config.info(self._addresses, self._role)

    def set_role(self, role: Role) -> None:
        """Serves `role` from now on. A sim engine takes prefills and decodes in any role, so only its name changes."""
        self._role = role

    def status(self) -> Status:
        """Returns the present counts. `running` counts the sequences that hold a slot; `token_budget` is the share of
        the budget that the current step uses. The fields for swapped requests, compute and memory bandwidth stay None:
        nothing is swapped here, and the timing model has no device.
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
        """Returns the totals since the start, and the present numbers of KV blocks."""
        steps = self._model.step_totals
        unscheduled = self._reads.unscheduled + self._prefixes.unscheduled
        return EngineMetrics(
            prefill_tokens=self._model.prefill_tokens_total,
            decode_tokens=self._model.decode_tokens_total,
            transfers=self._reads.transfers + self._prefixes.transfers,
            transfer_bytes=self._reads.n_bytes + self._prefixes.n_bytes,
            transfer_s=self._reads.seconds + self._prefixes.seconds,
            transfer_descriptors=self._reads.blocks + self._prefixes.blocks,
            transfer_failures=self._reads.failures + self._prefixes.failures,
            leases_expired=self._leases.expired,
            kv_blocks_total=self._pool.total,
            kv_blocks_used=self._pool.used,
            kv_blocks_free=self._pool.free,
            preemptions=self._model.preemptions_total,
            stalls=self._watch.stalls,
            transfers_unscheduled=unscheduled if self.config.flow_agent else None,
            collectives=self._collectives.ended,
            collective_s=self._collectives.seconds,
            reuse_wait_s=self._prefixes.stalled_s,
            step_s=steps.busy_s,
            prefill_steps=steps.prefill_steps,
            prefill_step_tokens=steps.prefill_tokens,
            decode_steps=steps.decode_steps,
            decode_step_seqs=steps.decode_seqs,
            decode_step_kv_tokens=steps.decode_kv_tokens,
        )

    @property
    def state(self) -> EngineState:
        """The state of the engine as far as its steps decide it: "stalled" if they stand still, "down" for good."""
        return "down" if self._dead is not None else self._watch.state

    @property
    def silent_s(self) -> float:
        """Seconds for which the steps have stood still."""
        return self._watch.silent_s

    def kv_events(self, rank: int = 0) -> list[Change]:
        """Returns the changes of the prefix cache since the last call; the list is empty without the option
        `kv_events`.
        """
        return self._pool.drain_changes()

    async def check_health(self) -> None:
        """Raises RuntimeError if the step loop has failed or stands still for good, or the engine was stopped."""
        self._watch.check()
        if self._dead is not None:
            raise RuntimeError(f"sim engine {self.config.engine_id} died: {self._dead!r}") from self._dead
        if self._stopped:
            raise RuntimeError(f"sim engine {self.config.engine_id} was stopped")

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new work and waits until all work and all leases have ended. Returns False if they have not after
        `timeout_s`.
        """
        self._draining = True
        deadline_s = self._loop.time() + timeout_s
        while self._prefills or self._decodes or self._reads or self._prefixes or self._leases:
            if self._loop.time() >= deadline_s:
                return False
            await asyncio.sleep(0.01)
        return True

    async def stop(self) -> None:
        """Ends everything at once; running tasks get no answer. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._prefixes.stop()
        self._reads.stop()
        self._puller.close()
        for mover in {self._mover, self._exchanger}:
            mover.stop()
        self._leases.stop()
        for pacer in self._pacers.values():
            pacer.stop()
        if self._faults is not None:
            self._faults.stop()
        self._watch.stop()
        tasks: list[PrefillTask | DecodeTask] = [*self._prefills.values(), *self._decodes.values()]
        for task in tasks:
            if task.timer is not None:
                task.timer.cancel()

    # ------------------------------------------------------------------------------------------------ requests

    def prefill(self, msg: Prefill) -> None:
        """Queues the computation of a prompt, whose KV is leased once it is computed. A prefix that another engine
        lends is read first.
        """
        try:
            self._check_open(msg.attempt_id in self._prefills)
            task = PrefillTask(self.config, msg, time.monotonic())
        except Refused as error:
            self._sink.failed(error.failed(msg.attempt_id, "prefill"))
            return
        if self._faults is not None:
            self._faults.take(msg.tokens, "prefill")
        # An older copy of this attempt's KV is no longer needed.
        self._leases.release(msg.attempt_id)
        task.timer = self._loop.call_later(max(0.0, msg.timeout_s), self._prefill_late, task)
        self._prefills[msg.attempt_id] = task
        if msg.prefix is None:
            self._queue_prefill(task)
        else:
            self._prefixes.begin(task, msg.tokens, msg.prefix)

    def _queue_prefill(self, task: PrefillTask) -> None:
        """Queues the computation of a prompt, unless it has ended while its prefix was read."""
        if self._prefills.get(task.attempt_id) is task:
            self._model.add(task.seq)
        self._clock.kick()

    def decode(self, msg: Decode) -> None:
        """Queues a decode. With a `handle` it reads the prefill engine's KV; without one it computes the prompt
        itself.
        """
        try:
            self._check_open(msg.attempt_id in self._decodes)
            task = DecodeTask(self.config, msg, self._loop.time())
            first = task.new_choice(self.config.max_model_len, self.config.mean_output_tokens)
        except Refused as error:
            self._sink.failed(error.failed(msg.attempt_id, "decode"))
            return
        if self._faults is not None:
            self._faults.take(msg.tokens, "decode")
        task.timer = self._loop.call_later(max(0.0, msg.timeout_s), self._decode_late, task)
        self._decodes[msg.attempt_id] = task
        self._model.add(first)
        self._clock.kick()

    def cancel(self, attempt_id: str) -> None:
        """Ends the tasks of `attempt_id` in any stage, and its lease."""
        prefill = self._prefills.get(attempt_id)
        if prefill is not None:
            self._end_prefill(prefill)
            self._prefixes.gone(prefill)
            self._model.remove(prefill.seq)
        decode = self._decodes.get(attempt_id)
        if decode is not None:
            self._end_decode(decode)
        self._leases.release(attempt_id)
        self._clock.kick()

    def release(self, attempt_id: str) -> None:
        """Ends the leases of `attempt_id`, if there are any."""
        self._leases.release(attempt_id)

    def renew(self, attempt_id: str, lease_s: float) -> None:
        """Renews the lease of `attempt_id` and answers at once."""
        self._sink.renewed(KVRenewed(attempt_id, self.renew_lease(attempt_id, lease_s)))

    def lease_rank(self, attempt_id: str) -> int:
        """Returns 0: this engine has one rank."""
        return 0

    def holds_lease(self, attempt_id: str) -> bool:
        """Whether this engine holds KV of `attempt_id` under a lease."""
        return self._leases.holds(attempt_id)

    def renew_lease(self, attempt_id: str, lease_s: float) -> float:
        """Makes the lease of `attempt_id` last for `lease_s` from now on. Returns the seconds that are left of it, or 0
        if it has ended.
        """
        return self._leases.renew(attempt_id, lease_s)

    def _check_open(self, busy: bool) -> None:
        """Raises Refused if the engine takes no tasks now, or if it is `busy` with a task of the same id."""
        name = self.config.engine_id
        if self._dead is not None or self._stopped:
            raise Refused("engine_dead", f"engine {name} is dead", retryable=True)
        if self._draining:
            raise Refused("draining", f"engine {name} takes no new work", retryable=True)
        if self._faults is not None and self._faults.order.fail is not None:
            raise Refused(self._faults.order.fail, f"engine {name} was ordered to fail", retryable=True)
        if busy:
            raise Refused("bad_request", f"engine {name} has a request of this id already")

    # ------------------------------------------------------------------------------------------------ steps

    def begin_step(self) -> float | None:
        """Begins a step. Returns its duration in seconds, or None if there is nothing to compute."""
        if self._stopped or self._dead is not None:
            return None
        self._watch.begins()
        if self._halted():
            return None
        try:
            seconds = self._model.begin_step()
            for seq in self._model.take_admitted():
                self._admitted(seq)
            self._prefixes.queue_moved()
        except Exception as error:
            self._die(error)
            return None
        if self._faults is not None and seconds is not None:
            seconds *= self._faults.order.slow
        if seconds is not None and self.config.staged:
            self._batch, self._step_s = self._leases.batch(self._model.steps + 1), seconds
            self._prefixes.step_began(self._batch, self._model.computing(), seconds)
        return seconds

    def before_group(self, group: int, go_on: Callable[[], None]) -> None:
        """Calls `go_on` when layer group `group` of the step may compute: its reused KV has arrived (MFS stage 1)."""
        self._prefixes.before_group(group, go_on)

    def after_group(self, group: int, go_on: Callable[[], None]) -> None:
        """Has the nodes of the instance exchange the activations of a layer group, then calls `go_on` (MFS stage 2)."""
        groups = self.config.layer_groups
        compute_s = self._step_s * (groups - group - 1) / groups

        def ended() -> None:
            self._prefixes.group_ended(group + 1)
            go_on()

        tokens = self._model.step_prefill_tokens
        self._collectives.exchange(self._batch, group, tokens, compute_s, ended)

    def end_step(self) -> None:
        """Ends the current step: sends its tokens, and leases the KV of the prompts that are now computed."""
        if self._stopped or self._dead is not None:
            return
        try:
            result = self._model.end_step()
            self._watch.step()
            items = self._items(result) if result.decoded else []
            for seq in result.prefilled:
                self._prefilled(seq)
            if items:
                self._sink.tokens(items)
        except Exception as error:
            self._die(error)

    def _halted(self) -> bool:
        """Returns whether an ordered fault stops the steps."""
        return self._faults is not None and self._faults.order.stalled

    def _items(self, result: StepResult) -> list[Out]:
        """Returns the pieces of all sequences that gained a token, and ends the sequences that are finished."""
        for seq in result.finished:
            cast(Choice, seq.owner).ends()
        items, first, ended = pieces(result.decoded, self._model.steps - 1)
        for choice in first:
            task = cast(DecodeTask, choice.request)
            # The other choices share the prompt's blocks, so they begin only after the first one has them.
            for _ in range(len(task.seqs), choice.params.n):
                self._model.add(task.new_choice(self.config.max_model_len, self.config.mean_output_tokens))
        for seq in ended:
            self._choice_ended(seq)
        return items

    def _choice_ended(self, seq: Sequence) -> None:
        self._model.remove(seq)
        task = decode_of(seq)
        task.left -= 1
        if task.left == 0:
            self._forget_decode(task)

    def _admitted(self, seq: Sequence) -> None:
        if seq.prefill_only:
            cast(PrefillTask, seq.owner).admitted_s = time.monotonic()
            return
        task = decode_of(seq)
        if seq.stage is SequenceStage.TRANSFERRING:
            self._sink.reading(Reading(task.attempt_id))
            self._reads.begin(task)
        elif not task.started:
            task.started = True
            self._sink.admitted(Admitted(task.attempt_id, cached_tokens=seq.cached_tokens))

    def _die(self, error: Exception) -> None:
        """Fails every task. Called after the step loop failed, which is a bug after which this engine cannot go on."""
        log.error("sim engine %s died", self.config.engine_id, exc_info=error)
        self._dead = error
        message = f"engine {self.config.engine_id} died: {error!r}"
        for prefill in list(self._prefills.values()):
            self._end_prefill(prefill)
            self._fail(prefill.attempt_id, "prefill", "engine_dead", message, True)
        for decode in list(self._decodes.values()):
            self._forget_decode(decode)
            self._fail(decode.attempt_id, "decode", "engine_dead", message, True)

    # ------------------------------------------------------------------------------------------------ ends

    def _fail(self, attempt_id: str, kind: Task, code: str, message: str, retryable: bool) -> None:
        self._sink.failed(Failed(attempt_id, kind, code, message, retryable))

    def _end_prefill(self, task: PrefillTask) -> None:
        del self._prefills[task.attempt_id]
        if task.timer is not None:
            task.timer.cancel()

    def _prefill_late(self, task: PrefillTask) -> None:
        self._end_prefill(task)
        self._prefixes.gone(task)
        self._model.remove(task.seq)
        self._fail(
            task.attempt_id, "prefill", "deadline", "the deadline passed before the prefill was done", False
        )
        self._clock.kick()

    def _decode_late(self, task: DecodeTask) -> None:
        self._end_decode(task)
        self._fail(task.attempt_id, "decode", "deadline", "the deadline passed before the last token", False)
        self._clock.kick()

    def _forget_decode(self, task: DecodeTask) -> None:
        task.gone = True
        del self._decodes[task.attempt_id]
        if task.timer is not None:
            task.timer.cancel()

    def _end_decode(self, task: DecodeTask) -> None:
        """Ends a decode before its last token, and frees its slot, its blocks and the prefill engine's copy.

        If its KV read has begun, these are freed when the read ends.
        """
        self._forget_decode(task)
        if task in self._reads:
            self._reads.gone(task)
            return  # the rest is freed when the read ends
        for seq in task.seqs:
            self._model.remove(seq)
        if task.handle is not None and not task.started:
            self._reads.end_remote(task.handle)

    def _read_failed(self, task: DecodeTask, reason: str) -> None:
        self._forget_decode(task)
        self._fail(task.attempt_id, "decode", "kv_load", reason, True)

    def _ordered(self) -> None:
        """Obeys a new order of a fault."""
        assert self._faults is not None
        order = self._faults.order
        self._puller.cut(order.cut)
        if order.expire:
            self._leases.expire_all()
        self._clock.kick()

    # ------------------------------------------------------------------------------------------------ leases (prefill)

    def _prefilled(self, seq: Sequence) -> None:
        task = cast(PrefillTask, seq.owner)
        self._end_prefill(task)
        assert seq.allocation is not None
        home = home_of(request_id_of(task.attempt_id), self.config.nodes)
        key = self._leases.grant(task.attempt_id, seq.allocation, seq.prompt_tokens, home)
        kv_bytes = self._timing.kv_bytes(seq.prompt_tokens)
        swapped = self._faults is not None and self._faults.order.swap
        handle = SimHandle(
            self.config.engine_id, self._addresses, key, seq.allocation.blocks, kv_bytes, seq.prompt_tokens,
            task.prompt_hash ^ swapped, self._leases.batch(self._model.steps), home,
        )  # fmt: skip
        queue_s, compute_s = task.admitted_s - task.received_s, time.monotonic() - task.admitted_s
        self._sink.prefill_done(
            PrefillDone(
                task.attempt_id, _encode(handle), task.prompt_tokens, seq.cached_tokens, self.config.lease_s, queue_s,
                compute_s, kv_bytes,
            )
        )  # fmt: skip
        if self._faults is not None and self._faults.order.lapse:
            self._leases.expire_all()

    def _free_lease(self, allocation: Allocation) -> None:
        self._pool.release(allocation)
        self._clock.kick()

    # ------------------------------------------------------------------------------------------------ other engines

    def peer_message(self, channel: Channel, message: Message) -> None:
        """Takes a message of a decode engine. Raises WireError if it is neither Pull nor Pulled."""
        self._leases.message(channel, message)

    def peer_closed(self, channel: Channel) -> None:
        """Ends the reads of a decode engine whose connection is lost."""
        self._leases.closed(channel)
