"""The TRANSFERRING stage in a sim engine that decodes: the task has its slot and blocks, and its KV is read.

    begin -> granted (the prefill engine protects its copy) -> the bytes move, here or paced by the other side -> ended
          -> failed (the copy is gone, its engine does not answer, the link is lost)

With a flow agent the bytes move in chunks, each by a permit (`flow`); without one they move at once. What has begun to
move always runs to its end before its blocks are used again, even if its request has ended by then. Of a read by permit
nothing more is posted once its request has ended.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from actors.engine.protocol import Sink
from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.flow import FlowMover
from actors.engine.sim.leases import LeaseKeeper
from actors.engine.sim.peers import Puller, SimHandle
from actors.engine.sim.tasks import DecodeTask
from actors.flow.reader import Finished
from actors.wire.messages import Admitted
from policies.engine_model.scheduler import EngineModel
from policies.engine_model.timing import TimingProfile
from policies.flow.base import Flow, Stage
from policies.flow.stages import home_of
from policies.request.attempts import request_id_of
from policies.state.views import OVERDUE_SHARE


class _Read:
    """The `Reader` of one task's KV. It passes the puller's reports on to `KvReads`."""

    def __init__(self, reads: "KvReads", task: DecodeTask) -> None:
        self._reads, self._task = reads, task

    def granted(self, paced: bool) -> None:
        self._reads.granted(self._task, paced)

    def sent(self, seconds: float, chunk: int) -> None:
        self._reads.sent(self._task, seconds, chunk)

    def read_failed(self, reason: str) -> None:
        self._reads.failed(self._task, reason)


class KvReads:
    """The reads of one engine, and their totals.

    `failed(task, reason)` ends a task whose KV cannot be read; `kick` starts the engine's steps if they rest.
    """

    def __init__(
        self,
        config: SimEngineConfig,
        timing: TimingProfile,
        model: EngineModel,
        puller: Puller,
        mover: FlowMover,
        failed: Callable[[DecodeTask, str], None],
        kick: Callable[[], None],
    ) -> None:
        self._config, self._timing, self._model = config, timing, model
        self._failed, self._kick = failed, kick
        self._puller, self._mover = puller, mover
        self._tasks: set[DecodeTask] = set()
        self._stopped = False
        self.transfers = self.n_bytes = self.blocks = self.failures = 0
        self.unscheduled = 0
        """Reads, well or failed, of which a part was posted without a permit."""
        self.seconds = 0.0
        self._flow_of: dict[DecodeTask, str] = {}
        self._flows = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, task: DecodeTask) -> bool:
        return task in self._tasks

    def start(self, sink: Sink, leases: LeaseKeeper) -> None:
        """Sets the engine's sink and its own `leases`. KV under these leases is already on this engine and is not
        pulled.
        """
        self._sink, self._leases = sink, leases
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Ends all reads. Nothing is reported any more."""
        self._stopped = True
        for task in self._tasks:
            if task.transfer is not None:
                task.transfer.cancel()

    # --------------------------------------------------------------------------------------------------- a read

    def begin(self, task: DecodeTask) -> None:
        """Starts to read the KV of a task that has its slot and blocks."""
        handle = cast(SimHandle, task.handle)
        self._tasks.add(task)
        if handle.engine_id != self._config.engine_id:
            n_bytes = self._bytes_to_read(task)
            self._puller.pull(handle, n_bytes, _Read(self, task), self._by_permit(handle, n_bytes))
        elif self._leases.begin_read(handle.lease):
            self._loop.call_soon(self.granted, task)
        else:
            self._loop.call_soon(self.failed, task, "this engine does not hold the KV any more")

    def granted(self, task: DecodeTask, paced: bool = False) -> None:
        """Starts to move the bytes that are not cached here, since the prefill engine now protects the KV.

        For a `paced` read the prefill engine counts the time, and `sent` is called when the bytes have arrived.
        """
        if self._stopped:
            return
        if task.gone:  # nothing has moved yet
            self._ended(task, 0, 0.0)
            return
        n_bytes = self._bytes_to_read(task)
        if self._by_permit(cast(SimHandle, task.handle), n_bytes):
            self._submit(task, n_bytes, paced)
        elif not paced:
            seconds = self._timing.transfer_s(n_bytes)
            task.transfer = self._loop.call_later(
                seconds + self._config.hold_transfers_s, self._ended, task, n_bytes, seconds
            )

    def sent(self, task: DecodeTask, seconds: float, chunk: int) -> None:
        """Ends a paced read, or part `chunk` of one by permit, whose bytes have arrived after `seconds`."""
        if self._stopped or task not in self._tasks:
            return
        if task in self._flow_of:
            self._mover.arrived(self._flow_of[task], chunk, seconds)
        else:
            n_bytes, hold_s = self._bytes_to_read(task), self._config.hold_transfers_s
            task.transfer = self._loop.call_later(hold_s, self._ended, task, n_bytes, seconds)

    def failed(self, task: DecodeTask, reason: str) -> None:
        """Ends a read that cannot begin or cannot be finished, and fails its task."""
        if task not in self._tasks:
            return  # the read has ended already
        if task in self._flow_of:
            self._mover.break_off(self._flow_of[task], reason)
            return
        self._tasks.discard(task)
        self.failures += 1
        if task.transfer is not None:
            task.transfer.cancel()
        self._model.remove(task.seqs[0])
        if not task.gone:
            self._failed(task, reason)
        self._kick()

    def end_remote(self, handle: SimHandle) -> None:
        """Tells the prefill engine that its copy is no longer needed."""
        if handle.engine_id != self._config.engine_id:
            self._puller.end(handle)
        else:
            self._leases.end_read(handle.lease)

    def gone(self, task: DecodeTask) -> None:
        """Notes that the request of a read has ended. A read by permit posts nothing more."""
        if task in self._flow_of:
            self._mover.abort(self._flow_of[task])

    # ------------------------------------------------------------------------------------------- reads by permit

    def _by_permit(self, handle: SimHandle, n_bytes: int) -> bool:
        """Whether a read waits for permits; a lender that names no node is unknown to the agents."""
        return self._config.flow_agent != "" and n_bytes > 0 and handle.node != ""

    def _submit(self, task: DecodeTask, n_bytes: int, paced: bool) -> None:
        """Submits a read to the agent. It is held for at most two thirds of a lease, or until its request's end."""
        handle, msg = cast(SimHandle, task.handle), task.msg
        self._flows += 1
        flow_id = f"{self._config.engine_id}/{self._flows}/{handle.lease}"
        now_s = self._loop.time()
        waited_s = now_s - task.received_s
        request_id = request_id_of(task.attempt_id)
        flow = Flow(
            flow_id=flow_id,
            request_id=request_id,
            batch=handle.batch or request_id,
            stage=Stage.P2D,
            source=handle.node,
            target=home_of(request_id, self._config.nodes),
            size=n_bytes,
            due_s=None if msg.kv_due_s is None else msg.kv_due_s - waited_s,
            engines=f"{handle.engine_id}>{self._config.engine_id}",
        )
        self._flow_of[task] = flow_id

        def move(number: int, size: int) -> float | None:
            if not paced:
                return self._timing.transfer_s(size)
            self._puller.chunk(handle, number, size)
            return None

        def ended(busy_s: float, finished: Finished, reason: str | None) -> None:
            self._flow_ended(task, n_bytes, busy_s, finished, reason)

        bound_s = min(self._config.lease_s * OVERDUE_SHARE, max(0.0, msg.timeout_s - waited_s))
        self._mover.submit(flow, bound_s, move, ended)

    def _flow_ended(
        self, task: DecodeTask, n_bytes: int, busy_s: float, finished: Finished, reason: str | None
    ) -> None:
        """Ends a read by permit, of which nothing is on its way any more."""
        del self._flow_of[task]
        if reason is not None:
            self.unscheduled += finished.unscheduled is not None
            self._puller.give_up(cast(SimHandle, task.handle))
            self.failed(task, reason)
            return
        hold_s = self._config.hold_transfers_s
        task.transfer = self._loop.call_later(hold_s, self._ended, task, n_bytes, busy_s, finished)

    def _bytes_to_read(self, task: DecodeTask) -> int:
        """Returns the number of bytes of the task's KV that are not cached here."""
        handle = cast(SimHandle, task.handle)
        if handle.engine_id == self._config.engine_id:
            return 0
        return handle.kv_bytes * (handle.tokens - task.seqs[0].cached_tokens) // handle.tokens

    def _ended(
        self, task: DecodeTask, n_bytes: int, seconds: float, finished: Finished | None = None
    ) -> None:
        """Ends a read that took `seconds`, without the configured hold and the time for which it had no permit. A read
        by permit has `finished`.
        """
        handle, seq = cast(SimHandle, task.handle), task.seqs[0]
        self._tasks.discard(task)
        self.end_remote(handle)
        if task.gone:
            self._model.remove(seq)
        else:
            blocks = self._model.pool.blocks_for(handle.tokens - seq.cached_tokens) if n_bytes else 0
            self.transfers += 1
            self.n_bytes += n_bytes
            self.seconds += seconds
            self.blocks += blocks
            self._model.loaded(seq)
            task.started = True
            self.unscheduled += finished is not None and finished.unscheduled is not None
            held_s, level = (0.0, None) if finished is None else (finished.held_s, finished.level)
            self._sink.admitted(
                Admitted(task.attempt_id, n_bytes, seconds, blocks, seq.cached_tokens, held_s, level)
            )
        self._kick()
