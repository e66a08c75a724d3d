"""A prefill engine without a queue: all prompts are computed at once, each at the pace of a lone one.

    t = prefill_base_s + prefill_per_token_s * (prompt - cached tokens)

Papers' simulators have it so that know prefill only as a latency (NetKV VI-A: T_prefill = c len + d; its TTFT less the
transfer is the same at every rate). No real engine is like this: `EngineSpec.prefill_queue` is True unless asked.
"""

from collections import deque

from benchmarks.sim.config import EngineSpec
from benchmarks.sim.engine import Meter, Owner, StepGroup, Worker
from benchmarks.sim.kernel import Kernel
from policies.engine_model.blocks import BlockError
from policies.engine_model.scheduler import Sequence, SequenceStage


class UnlimitedPrefill(Worker):
    """An engine without a prefill queue. Prompts that its pool cannot hold yet wait, in order of arrival."""

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
        """See `Worker.add`."""
        needed = self.pool.blocks_for(seq.prompt_tokens)
        if needed > self.pool.total:
            raise BlockError(f"the sequence needs {needed} KV blocks, the engine has {self.pool.total}")
        seq.stage = SequenceStage.QUEUED
        self._queue.append(seq)
        self.admit()

    def remove(self, seq: Sequence) -> None:
        """See `Worker.remove`; a prompt under way is given up at once."""
        if seq.stage is SequenceStage.PREFILLING:
            self._computing -= 1
            assert seq.allocation is not None
            self.pool.release(seq.allocation)
            seq.allocation = None
        if seq.stage is not SequenceStage.LEASED:
            seq.stage = SequenceStage.DONE
        self.admit()

    def admit(self) -> None:
        """Starts the waiting prompts that fit."""
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
            return  # removed
        assert seq.allocation is not None
        self._computing -= 1
        self.pool.commit(seq.allocation, seq.hashes)
        seq.stage = SequenceStage.LEASED
        self._publish()
        self.owner.prefilled(self, seq)


class NoSteps(StepGroup):
    """The step group of an `UnlimitedPrefill`, which has no steps: a kick (blocks are free again) only admits."""

    def __init__(self, kernel: Kernel, worker: UnlimitedPrefill, meter: Meter) -> None:
        super().__init__(kernel, [worker], meter)
        self._worker = worker

    def kick(self) -> None:
        self._worker.admit()
