"""A prefill engine without a queue. It computes all prompts at once, each as fast as if it were alone:

    t = prefill_base_s + prefill_per_token_s * (prompt - cached tokens)

Some papers' simulators model prefill in this way, only as a latency. (NetKV VI-A has T_prefill = c len + d, and its
TTFT less the transfer is the same at every rate.) No real engine behaves like this, so `EngineSpec.prefill_queue` is
True by default.
"""

from collections import deque

from benchmarks.sim.config import EngineSpec
from benchmarks.sim.engine import Meter, Owner, StepGroup, Worker
from benchmarks.sim.kernel import Kernel
from policies.engine_model.blocks import BlockError
from policies.engine_model.scheduler import Sequence, SequenceStage


class UnlimitedPrefill(Worker):
    """An engine without a prefill queue. Only prompts that its KV blocks cannot hold yet wait, in order of arrival."""

    def __init__(
        self, name: str, node: str, nic: int | None, spec: EngineSpec, owner: Owner, record_kv: bool
    ) -> None:
        super().__init__(name, node, nic, spec, owner, record_kv)
        self._queue: deque[Sequence] = deque()
        self._computing = 0

    @property
    def n_active(self) -> int:
        return self._computing

    @property
    def n_waiting(self) -> int:
        return sum(seq.stage is SequenceStage.QUEUED for seq in self._queue)

    def add(self, seq: Sequence) -> None:
        """Starts a prompt, or queues it until blocks are free. Raises BlockError if it can never fit."""
        needed = self.pool.blocks_for(seq.prompt_tokens)
        if needed > self.pool.total:
            raise BlockError(f"the sequence needs {needed} KV blocks, the engine has {self.pool.total}")
        seq.stage = SequenceStage.QUEUED
        self._queue.append(seq)
        self.admit()

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence at once, also one whose prompt is being computed."""
        if seq.stage is SequenceStage.PREFILLING:
            self._computing -= 1
            assert seq.allocation is not None
            self.pool.release(seq.allocation)
            seq.allocation = None
        if seq.stage is not SequenceStage.LEASED:
            seq.stage = SequenceStage.DONE
        self.admit()

    def admit(self) -> None:
        """Starts the waiting prompts, in order, up to the first that does not fit into the free blocks."""
        queue, pool = self._queue, self.pool
        while queue:
            seq = queue[0]
            if seq.stage is SequenceStage.QUEUED:
                may_hit = seq.hashes[: (seq.prompt_tokens - 1) // pool.block_size_tokens]
                seq.allocation = pool.allocate(may_hit, pool.blocks_for(seq.prompt_tokens))
                if seq.allocation is None:
                    return
                self._start(seq)
            queue.popleft()

    def _start(self, seq: Sequence) -> None:
        assert seq.allocation is not None
        seq.cached_tokens = seq.allocation.hits * self.pool.block_size_tokens
        seq.stage = SequenceStage.PREFILLING
        self._computing += 1
        self.owner.admitted(self, seq)
        seconds = self.spec.profile.step_s(seq.prompt_tokens - seq.cached_tokens, 0, 0)
        self.group.kernel.after(seconds, lambda: self._end(seq))

    def _end(self, seq: Sequence) -> None:
        if seq.stage is not SequenceStage.PREFILLING:
            # The sequence has been removed.
            return
        assert seq.allocation is not None
        self._computing -= 1
        self.pool.commit(seq.allocation, seq.hashes)
        seq.stage = SequenceStage.LEASED
        self._publish()
        self.owner.prefilled(self, seq)


class NoSteps(StepGroup):
    """The step group of an `UnlimitedPrefill`, which has no steps. A kick only starts prompts that wait for blocks."""

    def __init__(self, kernel: Kernel, worker: UnlimitedPrefill, meter: Meter) -> None:
        super().__init__(kernel, [worker], meter)
        self._worker = worker

    def kick(self) -> None:
        self._worker.admit()
