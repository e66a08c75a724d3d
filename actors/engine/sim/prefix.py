"""Prefixes that another engine lends a sim engine's prefill (`Prefill.prefix`; MFS stage 1).

Without layer groups a prefix is read whole before the prefill is queued: the blocks that are not cached here are taken,
filled by the read, and left in the prefix cache, where the prefill finds them as hits. With a flow agent the read is a
flow whose relative layer index is the number of requests before its own, which falls as those are computed or end, as
in vLLM engines: the requests that wait in the queue, and those whose prefixes are read whole since earlier. Priorities
are left out of that here.

With layer groups the prefill is queued as soon as the lender protects its copy. The step that begins it submits one
flow for each group, into the prompt's own blocks, with the distance of its group as relative layer index; it falls as
groups end. A group computes when the flows of its layers have arrived.

No prefill fails for its prefix: whatever goes wrong, the prompt is computed. A read that has begun runs to its end
before its blocks are used for anything else; of one by permit nothing more is posted once its request has ended.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.flow import FlowMover
from actors.engine.sim.peers import Puller, SimHandle, handle_of
from actors.engine.sim.tasks import PrefillTask
from actors.flow.reader import Finished
from policies.engine_model import scheduler, text
from policies.engine_model.blocks import Allocation
from policies.engine_model.borrowing import Borrowed, borrow, give_up, keep
from policies.engine_model.scheduler import EngineModel, SequenceStage
from policies.engine_model.timing import TimingProfile
from policies.flow.stages import advanced_rli, home_of, reuse_flow
from policies.request.attempts import request_id_of
from policies.state.views import OVERDUE_SHARE


class PrefixReads:
    """The reads of prefixes of one engine, and their totals. `queue(task)` queues a prefill that is to be computed now;
    it is called exactly once for each, not before `begin` has returned where something is read.
    """

    def __init__(
        self,
        config: SimEngineConfig,
        timing: TimingProfile,
        model: EngineModel,
        puller: Puller,
        mover: FlowMover,
        queue: Callable[[PrefillTask], None],
    ) -> None:
        self._config, self._timing, self._model = config, timing, model
        self._puller, self._mover, self._queue = puller, mover, queue
        self._open: dict[PrefillTask, _PrefixRead] = {}
        self._missing: dict[str, int] = {}
        """The layer groups that wait for flows of the present step, by flow."""
        self._waits: tuple[int, float, Callable[[], None]] | None = None
        """The group that waits for its flows, since when, and what goes on after them."""
        self._submitted = 0
        self.transfers = self.n_bytes = self.blocks = self.failures = 0
        self.unscheduled = 0
        """Reads, well or failed, of which a part was posted without a permit."""
        self.seconds = 0.0
        self.stalled_s = 0.0
        """Seconds for which layer groups waited for reused KV."""

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, task: PrefillTask, tokens: Sequence[int], prefix: bytes) -> None:
        """Reads what is not cached here of a lent prefix, and queues the prefill: afterwards, or with layer groups once
        it may be read.
        """
        handle = _head_of(prefix, tokens)
        if handle is None or handle.engine_id == self._config.engine_id:
            self._queue(task)
            return
        known = handle.node != "" and self._config.flow_node != ""
        if known and self._config.layer_groups > 1:
            self._begin_by_layers(task, handle)
            return
        borrowed = borrow(self._model.pool, task.seq.hashes, handle.tokens)
        if borrowed is None:
            # all of it is cached, or there is no room to read it into
            self._puller.end(handle)
            self._queue(task)
            return
        by_permit = known and self._config.flow_agent != ""
        read = _PrefixRead(self, task, handle, by_permit)
        read.take(borrowed.tokens)
        read.borrowed = borrowed
        self._open[task] = read
        self._puller.pull(handle, read.n_bytes, read, by_permit)

    def gone(self, task: PrefillTask) -> None:
        """Notes that a prefill has ended early. The blocks of flows under way are freed when these have arrived, so it
        must be called before the task's sequence is removed.
        """
        read = self._open.get(task)
        if read is None or (read.borrowed is not None and not read.flows):
            # what is read without permits, or has not begun, goes on to its end
            return
        read.gone = True
        if read.flows and read.borrowed is None:
            read.allocation, task.seq.allocation = task.seq.allocation, None
        for flow_id in list(read.flows):
            self._missing.pop(flow_id, None)
            self._mover.abort(flow_id)
        if read.protected and not read.begun:
            self._end(read)
        self._go_on()

    def stop(self) -> None:
        """Ends all reads. Nothing is queued any more."""
        for read in self._open.values():
            if read.timer is not None:
                read.timer.cancel()
        self._open.clear()

    def queue_moved(self) -> None:
        """Notes that requests may have left the queue: the prefixes of those behind them are needed sooner."""
        for read, before in self._places():
            for flow_id in read.flows:
                self._mover.advanced(flow_id, before)

    # ------------------------------------------------------------------------------------------------ layer groups

    def step_began(self, batch: str, members: Iterable[scheduler.Sequence], compute_s: float) -> None:
        """Submits the flows of the prompts that begin with this step, named `batch`, which computes for `compute_s`."""
        for seq in members:
            read = self._open.get(seq.owner) if isinstance(seq.owner, PrefillTask) else None
            if read is None or read.begun or read.borrowed is not None:
                continue
            read.begun = True
            assert seq.allocation is not None
            missing = seq.lent_tokens - seq.allocation.hits * self._model.pool.block_size_tokens
            if missing <= 0:
                # others have computed it meanwhile
                self._end(read)
                continue
            read.take(missing)
            hold_s = min(self._config.step_hold_s, self._config.lease_s * OVERDUE_SHARE)
            self._submit(read, batch, self._config.layer_groups, compute_s, hold_s)

    def before_group(self, group: int, go_on: Callable[[], None]) -> None:
        """Calls `go_on` when the reused KV of a layer group has arrived, at once if it has."""
        if group in self._missing.values():
            self._waits = (group, time.monotonic(), go_on)
        else:
            go_on()

    def group_ended(self, done: int) -> None:
        """Notes that the first `done` groups of the step have ended: the data of the others is needed sooner."""
        for flow_id, group in list(self._missing.items()):
            if group >= done:
                self._mover.advanced(flow_id, advanced_rli(group, done))

    # ------------------------------------------------------------------------------------------------ of the puller

    def granted(self, read: "_PrefixRead", paced: bool) -> None:
        """Lets a read begin, since the lender now protects its copy."""
        if self._open.get(read.task) is not read:
            return
        read.protected, read.paced = True, paced
        if read.gone:
            self._end(read)
        elif read.borrowed is None:
            read.task.seq.lent_tokens = self._lent_tokens(read.handle)
            self._queue(read.task)
        elif read.by_permit:
            self._submit_whole(read)
        elif not paced:
            seconds = self._timing.transfer_s(read.n_bytes)
            read.timer = asyncio.get_running_loop().call_later(seconds, self.ended, read, seconds)

    def ended(self, read: "_PrefixRead", seconds: float) -> None:
        """Takes the blocks of a whole read, which took `seconds`, into the cache."""
        if self._open.get(read.task) is not read:
            return
        assert read.borrowed is not None
        keep(self._model.pool, read.borrowed)
        self._count(read, seconds)
        self._end(read)
        self._queue(read.task)

    def failed(self, read: "_PrefixRead", reason: str) -> None:
        """Has the prompt of a read that cannot begin, or broke off, computed."""
        if self._open.get(read.task) is not read or read.failed:
            return
        read.failed = True
        self.failures += 1
        self.unscheduled += read.unscheduled
        if read.timer is not None:
            read.timer.cancel()
        if read.borrowed is None and not read.gone:
            self._compute_all(read)
        for flow_id in list(read.flows):
            self._missing.pop(flow_id, None)
            self._mover.break_off(flow_id, reason)
        if self._open.get(read.task) is read:
            self._end(read)
            if read.borrowed is not None:
                give_up(self._model.pool, read.borrowed)
                self._queue(read.task)
        self._go_on()

    # ------------------------------------------------------------------------------------------------------- inside

    def _begin_by_layers(self, task: PrefillTask, handle: SimHandle) -> None:
        lent = self._lent_tokens(handle)
        size = self._model.pool.block_size_tokens
        if self._model.pool.hits(task.seq.hashes[: lent // size]) * size >= lent:
            self._puller.end(handle)
            self._queue(task)
            return
        read = self._open[task] = _PrefixRead(self, task, handle, by_permit=True)
        read.take(lent)
        self._puller.pull(handle, read.n_bytes, read, True)

    def _lent_tokens(self, handle: SimHandle) -> int:
        """Returns the tokens of the full blocks of a lent prefix; its last token is not lent (`borrowing.borrow`)."""
        size = self._model.pool.block_size_tokens
        return max(0, handle.tokens - 1) // size * size

    def _submit_whole(self, read: "_PrefixRead") -> None:
        """Submits a whole read; the number of requests before its own is its relative layer index."""
        missing = len(read.task.seq.hashes) * self._model.pool.block_size_tokens - read.tokens
        compute_s = self._timing.step_s(max(1, missing), 0, 0)
        rli = next(before for other, before in self._places() if other is read)
        self._submit(read, "", 1, compute_s, self._config.lease_s * OVERDUE_SHARE, rli)

    def _places(self) -> Iterator[tuple["_PrefixRead", int]]:
        """Yields the prefixes that are read whole, each with the number of requests before its own."""
        whole = (read for read in self._open.values() if read.borrowed is not None and not read.gone)
        for place, read in enumerate(whole, self._model.n_waiting):
            yield read, place

    def _submit(
        self, read: "_PrefixRead", batch: str, groups: int, compute_s: float, hold_s: float, rli: int = 0
    ) -> None:
        request_id = request_id_of(read.task.attempt_id)
        self._submitted += 1
        prefix = f"{self._config.engine_id}/{self._submitted}/"
        home = home_of(request_id, self._config.nodes)
        batch = batch or request_id
        read.begun, read.begun_s = True, time.monotonic()
        flows = [
            replace(
                reuse_flow(
                    request_id,
                    batch,
                    read.handle.node,
                    home,
                    read.n_bytes,
                    group,
                    groups,
                    compute_s,
                    prefix,
                    rli,
                ),
                engines=f"{read.handle.engine_id}>{self._config.engine_id}",
            )
            for group in range(groups)
        ]
        # all of them are open before the first can end
        read.flows.update((flow.flow_id, group) for group, flow in enumerate(flows))
        if groups > 1:
            self._missing.update(read.flows)
        for flow in flows:
            self._mover.submit(
                flow,
                hold_s,
                partial(self._move, read, flow.flow_id),
                partial(self._flow_ended, read, flow.flow_id),
            )

    def _move(self, read: "_PrefixRead", flow_id: str, number: int, n_bytes: int) -> float | None:
        if not read.paced:
            return self._timing.transfer_s(n_bytes)
        read.parts.append((flow_id, number))
        self._puller.chunk(read.handle, len(read.parts) - 1, n_bytes)
        return None

    def arrived(self, read: "_PrefixRead", part: int, seconds: float) -> None:
        """Notes that a part of a read by permit has arrived."""
        if part < len(read.parts):
            self._mover.arrived(*read.parts[part], seconds)

    def _flow_ended(
        self, read: "_PrefixRead", flow_id: str, busy_s: float, finished: Finished, reason: str | None
    ) -> None:
        del read.flows[flow_id]
        self._missing.pop(flow_id, None)
        read.unscheduled |= finished.unscheduled is not None
        if reason is not None and not read.failed:
            # the flow broke down here, while the lender is well
            self._puller.give_up(read.handle)
            self.failed(read, reason)
        elif not read.flows:
            if read.borrowed is None:
                if not read.failed and not read.gone:
                    self._count(read, time.monotonic() - read.begun_s)
                self._end(read)
            elif read.gone:
                give_up(self._model.pool, read.borrowed)
                self._end(read)
                self._queue(read.task)
            elif not read.failed:
                self.ended(read, busy_s)
        self._go_on()

    def _compute_all(self, read: "_PrefixRead") -> None:
        """Has the whole prompt computed, from the beginning if a step was computing the rest of it."""
        seq = read.task.seq
        seq.lent_tokens = 0
        if not read.protected:
            self._queue(read.task)
        elif seq.stage is SequenceStage.PREFILLING:
            self._model.remove(seq)
            self._model.add(seq)

    def _count(self, read: "_PrefixRead", seconds: float) -> None:
        self.transfers += 1
        self.unscheduled += read.unscheduled
        self.n_bytes += read.n_bytes
        self.blocks += read.tokens // self._model.pool.block_size_tokens
        self.seconds += seconds

    def _end(self, read: "_PrefixRead") -> None:
        """Forgets a read, of which nothing is on its way, and gives the lender's copy back."""
        del self._open[read.task]
        if not read.failed:
            self._puller.end(read.handle)
        if read.allocation is not None:
            self._model.pool.release(read.allocation)

    def _go_on(self) -> None:
        """Lets the group that waits compute, if all its flows have ended."""
        if self._waits is None or self._waits[0] in self._missing.values():
            return
        (_, since_s, go_on), self._waits = self._waits, None
        self.stalled_s += time.monotonic() - since_s
        go_on()


class _PrefixRead:
    """One read; the `Reader` that the puller tells of it.

    `borrowed` are the blocks of a whole read; a read by layer groups has none, because the prompt's own blocks are
    filled, of which `allocation` is what is left when the prefill has ended early.
    """

    def __init__(self, reads: PrefixReads, task: PrefillTask, handle: SimHandle, by_permit: bool) -> None:
        self._reads, self.task, self.handle, self.by_permit = reads, task, handle, by_permit
        self.borrowed: Borrowed | None = None
        self.allocation: Allocation | None = None
        self.tokens = self.n_bytes = 0
        self.begun_s = 0.0
        self.protected = self.paced = self.begun = self.gone = self.failed = self.unscheduled = False
        # the layer groups of open flows
        self.flows: dict[str, int] = {}
        # by number of a part at the lender: its flow, and its number there
        self.parts: list[tuple[str, int]] = []
        self.timer: asyncio.TimerHandle | None = None

    def take(self, tokens: int) -> None:
        """Sets how many tokens of the prefix are read."""
        self.tokens, self.n_bytes = tokens, self.handle.kv_bytes * tokens // self.handle.tokens

    def granted(self, paced: bool) -> None:
        self._reads.granted(self, paced)

    def sent(self, seconds: float, chunk: int) -> None:
        if self.by_permit:
            self._reads.arrived(self, chunk, seconds)
        else:
            self._reads.ended(self, seconds)

    def read_failed(self, reason: str) -> None:
        self._reads.failed(self, reason)


def _head_of(prefix: bytes, tokens: Sequence[int]) -> SimHandle | None:
    """Returns the handle of a lent prefix; None if no sim engine made it, or if it is no head of the prompt."""
    try:
        handle = handle_of(prefix)
    except ValueError:
        return None
    if not 0 < handle.tokens <= len(tokens):
        return None
    return handle if handle.prompt_hash == text.prompt_hash(list(tokens[: handle.tokens])) else None
