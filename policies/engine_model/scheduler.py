"""Continuous batching of one engine: queue, slots, blocks, steps. Driven from outside, so it runs live and simulated:

    seconds = model.begin_step()    None: nothing to compute
    ... that much time passes ...
    result = model.end_step()       who gained a token, who finished, whose prefill is done

In between sequences may be added, removed and loaded; they take part from the next step on (removed ones not any more).

One step computes prompt chunks within the token budget and one token for every running sequence. Admission is by
(priority, arrival), lower first, and stops at the first that does not fit: nothing overtakes. A sequence takes a slot
and the blocks of its prompt when admitted, and a further block whenever its output fills one. Where none is left, the
running sequence of the lowest standing gives its blocks up and is computed again later (preemption by recomputation).
A *remote* sequence gets its prompt's KV from another engine: it is admitted like any other (its slot and blocks are
taken before the transfer starts), reported by `take_admitted`, and runs after `loaded`; its first token comes one step
later, since that step computes the last prompt token (as vLLM does).

Cost: all running sequences advance by one counter; a step touches only those that finish or need a block.
Not claimed: layer-wise pipelining, swapping, chunk interleaving policies other than first come first served.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from policies.engine_model.blocks import Allocation, BlockError, BlockHash, BlockPool
from policies.engine_model.timing import TimingProfile


class Stage(Enum):
    """Where a sequence is. WAITING and DONE hold neither slot nor blocks; LEFT_KV holds blocks only."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    LOADING = "loading"
    RUNNING = "running"
    LEFT_KV = "left_kv"  # a prefill is done: its blocks now belong to whoever took the allocation
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence. The first block is given by the caller, the second belongs to the model.

    `output_tokens`: after how many it finishes at the latest (0 for `prefill_only`). `hashes`: of the full blocks of
    the prompt, or none to keep it out of the prefix cache. `owner` is the caller's own.
    """

    prompt_tokens: int
    output_tokens: int
    hashes: tuple[BlockHash, ...] = ()
    priority: int = 0
    prefill_only: bool = False
    remote: bool = False
    owner: object = None

    stage: Stage = Stage.DONE
    allocation: Allocation | None = None
    cached_tokens: int = 0  # of the prompt, when last admitted
    computed: int = 0  # tokens whose KV exists, while PREFILLING
    offset: int = 0  # of the model's step counter: generated = steps - offset while RUNNING
    generated: int = 0  # while not RUNNING
    due: int = -1  # the step at which it finishes or needs a block, while RUNNING
    order: int = 0  # of arrival
    preemptions: int = 0


@dataclass(slots=True)
class StepResult:
    """What a step brought. Each member of `decoded` gained one token; `finished` is those for which it was the last."""

    decoded: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    prefilled: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class EngineModel:
    """One engine's queue, slots, blocks and step clock. `slots`: most sequences computed or loading at once.

    `prefill_budget_tokens`: prompt tokens of one step; without `chunked` a longer prompt takes a step of its own.
    The pool must hold one sequence of any length that is admitted, else it preempts itself for ever: `add` refuses it.
    """

    def __init__(
        self,
        timing: TimingProfile,
        pool: BlockPool,
        slots: int,
        prefill_budget_tokens: int = 8192,
        chunked: bool = True,
    ) -> None:
        if slots < 1 or prefill_budget_tokens < 1:
            raise ValueError(f"{slots=}, {prefill_budget_tokens=}: both must be at least 1")
        self.timing = timing
        self.pool = pool
        self.slots = slots
        self.budget_tokens = prefill_budget_tokens
        self.chunked = chunked
        self.steps = 0
        self.running: dict[Sequence, None] = {}
        self.kv_tokens = 0  # of the running ones: prompt and output
        self.prefill_tokens_total = 0
        self.decode_tokens_total = 0
        self.preemptions_total = 0
        self._waiting: list[tuple[int, int, Sequence]] = []  # heap; stale entries are skipped
        self._n_waiting = 0
        self._orders = 0
        self._prefilling: dict[Sequence, None] = {}
        self._loading: dict[Sequence, None] = {}
        self._admitted: list[Sequence] = []
        self._joining: dict[Sequence, None] = {}
        self._due: dict[int, list[Sequence]] = {}
        self._chunks: list[tuple[Sequence, int]] = []
        self._in_step = False

    # ------------------------------------------------------------------------------------------------ queries

    @property
    def n_waiting(self) -> int:
        return self._n_waiting

    @property
    def n_active(self) -> int:
        """Sequences that hold a slot."""
        return len(self.running) + len(self._prefilling) + len(self._loading) + len(self._joining)

    @property
    def step_tokens(self) -> int:
        """Tokens that the step under way computes; 0 between steps."""
        return sum(chunk for _, chunk in self._chunks) + len(self.running) if self._in_step else 0

    def generated(self, seq: Sequence) -> int:
        """Output tokens of `seq` so far."""
        return self.steps - seq.offset if seq in self.running else seq.generated

    # ------------------------------------------------------------------------------------------------ changes

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence. Raises BlockError if the whole pool cannot hold it."""
        needed = self.pool.blocks_for(seq.prompt_tokens + max(0, seq.output_tokens - 1))
        if needed > self.pool.total:
            raise BlockError(f"the sequence needs {needed} KV blocks, the engine has {self.pool.total}")
        seq.order = self._orders
        self._orders += 1
        self._queue(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes `seq` out, whatever its stage, and frees its slot and blocks. Idempotent.

        The caller must not remove a LOADING one under whose blocks a transfer still writes.
        """
        match seq.stage:
            case Stage.DONE | Stage.LEFT_KV:
                return
            case Stage.WAITING:
                self._n_waiting -= 1
            case Stage.PREFILLING:
                del self._prefilling[seq]
            case Stage.LOADING:
                del self._loading[seq]
            case Stage.RUNNING:
                self._leave_batch(seq)
        self._free(seq)
        seq.stage = Stage.DONE

    def take_admitted(self) -> list[Sequence]:
        """Those that `begin_step` admitted since the last call; the transfers of the LOADING ones are to start now."""
        if not self._admitted:
            return []
        admitted, self._admitted = self._admitted, []
        return [seq for seq in admitted if seq.stage in (Stage.LOADING, Stage.PREFILLING)]

    def loaded(self, seq: Sequence) -> None:
        """The KV of a LOADING sequence is here: it runs from the next step on."""
        assert seq.stage is Stage.LOADING
        assert seq.allocation is not None
        del self._loading[seq]
        self.pool.commit(seq.allocation, seq.hashes)
        seq.stage = Stage.RUNNING
        self._joining[seq] = None

    def begin_step(self) -> float | None:
        """Starts the next step; its duration in seconds, or None if nothing can be computed now."""
        if self._n_waiting:
            self._admit()
        if self._joining:
            joining, self._joining = self._joining, {}
            for seq in joining:
                self._enter_batch(seq)
        prefill_tokens = self._plan_chunks() if self._prefilling else 0
        if not prefill_tokens and not self.running:
            return None
        self._in_step = True
        return self.timing.step_s(prefill_tokens, len(self.running), self.kv_tokens)

    def end_step(self) -> StepResult:
        """Ends the step that `begin_step` started."""
        assert self._in_step, "end_step without begin_step"
        self._in_step = False
        self.steps += 1
        batch = len(self.running)
        self.kv_tokens += batch
        self.decode_tokens_total += batch
        result = StepResult(decoded=list(self.running))
        if self._chunks:
            self._end_chunks(result)
        due = self._due.pop(self.steps, None)
        if due is not None:
            self._handle_due(due, result)
        return result

    # ------------------------------------------------------------------------------------------------ admission

    def _queue(self, seq: Sequence) -> None:
        seq.stage = Stage.WAITING
        self._n_waiting += 1
        heapq.heappush(self._waiting, (seq.priority, seq.order, seq))

    def _admit(self) -> None:
        while self._waiting:
            seq = self._waiting[0][2]
            if seq.stage is not Stage.WAITING:
                heapq.heappop(self._waiting)
                continue
            if self.n_active >= self.slots or not self._allocate(seq):
                return
            heapq.heappop(self._waiting)
            self._n_waiting -= 1
            self._admitted.append(seq)
            if seq.remote:
                seq.stage = Stage.LOADING
                self._loading[seq] = None
            else:
                seq.stage = Stage.PREFILLING
                self._prefilling[seq] = None

    def _allocate(self, seq: Sequence) -> bool:
        """Blocks of the prompt and of what was generated before a preemption. The last token is always computed."""
        tokens = seq.prompt_tokens + seq.generated
        size = self.pool.block_size_tokens
        may_hit = seq.hashes[: (tokens - 1) // size]
        seq.allocation = self.pool.allocate(may_hit, self.pool.blocks_for(tokens))
        if seq.allocation is None:
            return False
        seq.computed = seq.allocation.hits * size
        seq.cached_tokens = min(seq.computed, seq.prompt_tokens)
        return True

    # ------------------------------------------------------------------------------------------------ prefill

    def _plan_chunks(self) -> int:
        """Prompt tokens of this step, in order of admission, within the budget."""
        left = self.budget_tokens
        self._chunks = []
        for seq in self._prefilling:
            todo = seq.prompt_tokens + seq.generated - seq.computed
            if todo <= left:
                chunk = todo
            elif self.chunked:
                chunk = left
            elif self._chunks:
                break
            else:
                chunk = todo  # longer than the budget: alone
            self._chunks.append((seq, chunk))
            left -= chunk
            if left <= 0:
                break
        return sum(chunk for _, chunk in self._chunks)

    def _end_chunks(self, result: StepResult) -> None:
        chunks, self._chunks = self._chunks, []
        for seq, chunk in chunks:
            self.prefill_tokens_total += chunk
            if seq.stage is not Stage.PREFILLING:
                continue  # removed while it was computed
            seq.computed += chunk
            if seq.computed < seq.prompt_tokens + seq.generated:
                continue
            assert seq.allocation is not None
            del self._prefilling[seq]
            self.pool.commit(seq.allocation, seq.hashes)
            if seq.prefill_only:
                seq.stage = Stage.LEFT_KV
                result.prefilled.append(seq)
                continue
            seq.stage = Stage.RUNNING
            self._enter_batch(seq, first_token=True)
            self.decode_tokens_total += 1
            result.decoded.append(seq)

    # ------------------------------------------------------------------------------------------------ decode

    def _enter_batch(self, seq: Sequence, first_token: bool = False) -> None:
        self.running[seq] = None
        seq.offset = self.steps - seq.generated - first_token
        self.kv_tokens += seq.prompt_tokens + seq.generated + first_token
        self._set_due(seq)

    def _set_due(self, seq: Sequence) -> None:
        """The step at which it has all its tokens, or its last block is full: the KV of token g is written in the step
        after it was sampled, so `blocks` blocks serve until prompt + g exceeds them.
        """
        assert seq.allocation is not None
        room = seq.allocation.blocks * self.pool.block_size_tokens - seq.prompt_tokens + 1
        seq.due = max(self.steps, seq.offset + min(seq.output_tokens, room))
        self._due.setdefault(seq.due, []).append(seq)

    def _leave_batch(self, seq: Sequence) -> None:
        if seq in self._joining:
            del self._joining[seq]
            return
        seq.generated = self.steps - seq.offset
        del self.running[seq]
        self.kv_tokens -= seq.prompt_tokens + seq.generated
        seq.due = -1

    def _handle_due(self, due: Iterable[Sequence], result: StepResult) -> None:
        growing = []
        for seq in due:
            if seq.due != self.steps:
                continue  # left the batch meanwhile
            seq.due = -1
            if self.steps - seq.offset >= seq.output_tokens:
                result.finished.append(seq)
                self.remove(seq)
            else:
                growing.append(seq)
        for seq in growing:
            while seq.stage is Stage.RUNNING:
                assert seq.allocation is not None
                if self.pool.grow(seq.allocation, 1):
                    self._set_due(seq)
                    break
                self._preempt(result)

    def _preempt(self, result: StepResult) -> None:
        victim = max(self.running, key=lambda seq: (seq.priority, seq.order))
        self._leave_batch(victim)
        self._free(victim)
        victim.remote = False  # its KV is computed here, its prompt too
        victim.preemptions += 1
        self.preemptions_total += 1
        result.preempted.append(victim)
        self._queue(victim)

    def _free(self, seq: Sequence) -> None:
        if seq.allocation is not None:
            self.pool.release(seq.allocation)
            seq.allocation = None
