"""Continuous batching of one engine: queue, slots, blocks, steps. The caller drives it, live or simulated:

    seconds = model.begin_step()    None: nothing to compute
    ... that much time passes ...
    result = model.end_step()       sequences that gained a token, finished, or whose prefill is done

Between the two calls sequences may be added, removed and loaded; they take part, or no longer do, from the next step
on.

One step computes prompt chunks within the token budget and one token for every running sequence. Admission is by
(priority, arrival), lower first, and stops at the first sequence that does not fit, so nothing overtakes. A sequence
takes a slot and the blocks of its prompt when it is admitted, and a further block whenever its output fills one. Where
no block is left, the running sequence that is last by (priority, arrival) gives its blocks up and is computed again
later (preemption by recomputation).
A *remote* sequence gets its prompt's KV from another engine. It is admitted like any other (its slot and blocks are
taken before the transfer starts), reported by `take_admitted`, and runs after `loaded`. Its first token comes one step
later, because that step computes the last prompt token (as vLLM does). With `ahead`, some remote sequences are loaded
while all slots are taken: they take their blocks, and a slot when one is free (BalanceRoute D.6).

Cost: one counter advances all running sequences; a step touches only the sequences that finish. `begin_steps` and
`end_steps` take many steps without prompts at once.
Not claimed: layer-wise pipelining, swapping, chunk interleaving policies other than first come first served.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

from policies.engine_model.batch import DecodeBatch
from policies.engine_model.blocks import BlockError, BlockPool
from policies.engine_model.sequence import Sequence, SequenceStage, StepResult
from policies.engine_model.timing import TimingProfile


class Steps(NamedTuple):
    """A run of `n` steps: step i (from 0) lasts first_s + i * growth_s, and the first computes `prefill_tokens`."""

    n: int
    first_s: float
    growth_s: float
    prefill_tokens: int


@dataclass(slots=True)
class StepTotals:
    """Sums over an engine's steps: their durations; the steps that computed prompts, with the prompt tokens; the steps
    that decoded, with their sequences and the KV tokens of these.
    """

    busy_s: float = 0.0
    prefill_steps: int = 0
    prefill_tokens: int = 0
    decode_steps: int = 0
    decode_seqs: int = 0
    decode_kv_tokens: int = 0


class EngineModel:
    """One engine's queue, slots, blocks and step counter. At most `slots` sequences are computed or loaded at once.

    A step computes at most `prefill_budget_tokens` prompt tokens; without `chunked` a longer prompt takes a step of its
    own. `ahead` more remote sequences may be loaded while the slots are taken. They run when slots are free, in the
    order in which they were loaded. `add` refuses a sequence that the whole pool could not hold, because it would
    preempt itself forever.
    """

    def __init__(
        self,
        timing: TimingProfile,
        pool: BlockPool,
        slots: int,
        prefill_budget_tokens: int = 8192,
        chunked: bool = True,
        ahead: int = 0,
    ) -> None:
        if slots < 1 or prefill_budget_tokens < 1 or ahead < 0:
            raise ValueError(
                f"{slots=}, {prefill_budget_tokens=}, {ahead=}: the first two must be at least 1, ahead at least 0"
            )
        self.timing = timing
        self.pool = pool
        self.slots = slots
        self.budget_tokens = prefill_budget_tokens
        self.chunked = chunked
        self.ahead = ahead
        self.batch = DecodeBatch(pool)
        self.prefill_tokens_total = 0
        self.decode_tokens_total = 0
        self.preemptions_total = 0
        self.step_totals = StepTotals()
        # of the present steps: the seconds of the first, and how many more each later one takes
        self._step = (0.0, 0.0)
        self._waiting: list[tuple[int, int, Sequence]] = []  # heap with stale entries
        self._n_waiting = 0
        self._orders = 0
        self._prefilling: dict[Sequence, None] = {}
        self._loading: dict[Sequence, None] = {}
        self._admitted: list[Sequence] = []
        self._joining: dict[Sequence, None] = {}
        self._chunks: list[tuple[Sequence, int]] = []
        self._in_step = False

    # ------------------------------------------------------------------------------------------------ queries

    @property
    def steps(self) -> int:
        """Number of steps that have ended."""
        return self.batch.steps

    @property
    def running(self) -> dict[Sequence, None]:
        """The sequences that decode, as an ordered set."""
        return self.batch.running

    @property
    def kv_tokens(self) -> int:
        """KV tokens of the running sequences: prompt and output."""
        return self.batch.kv_tokens

    @property
    def n_waiting(self) -> int:
        return self._n_waiting

    @property
    def n_active(self) -> int:
        """Number of sequences that hold a slot, or are loaded ahead of one."""
        return len(self.running) + len(self._prefilling) + len(self._loading) + len(self._joining)

    @property
    def step_tokens(self) -> int:
        """Number of tokens that the step under way computes; 0 between steps."""
        return sum(chunk for _, chunk in self._chunks) + len(self.running) if self._in_step else 0

    def generated(self, seq: Sequence) -> int:
        """Returns the number of output tokens that `seq` has so far."""
        return self.batch.generated(seq) if seq in self.batch.running else seq.generated

    def awaits_slot(self, seq: Sequence) -> bool:
        """Whether the KV of `seq` has arrived and no step has begun with it since."""
        return seq in self._joining

    def ending_prefills(self) -> list[Sequence]:
        """Returns the sequences whose prompt will be complete when the step under way ends."""
        return [
            seq
            for seq, chunk in self._chunks
            if seq.computed + chunk >= seq.prompt_tokens + seq.generated
            and seq.stage is SequenceStage.PREFILLING
        ]

    def computing(self) -> list[Sequence]:
        """Returns the sequences whose prompts the step under way computes."""
        return [seq for seq, _ in self._chunks]

    @property
    def step_prefill_tokens(self) -> int:
        """Number of prompt tokens that the step under way computes; 0 between steps."""
        return sum(chunk for _, chunk in self._chunks) if self._in_step else 0

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
        """Takes `seq` out, whatever its stage, and frees its slot and blocks. A second call changes nothing.

        The caller must not remove a TRANSFERRING sequence while a transfer still writes into its blocks.
        """
        match seq.stage:
            case SequenceStage.DONE | SequenceStage.LEASED:
                return
            case SequenceStage.QUEUED:
                self._n_waiting -= 1
            case SequenceStage.PREFILLING:
                del self._prefilling[seq]
            case SequenceStage.TRANSFERRING:
                del self._loading[seq]
            case SequenceStage.DECODING if seq in self._joining:
                del self._joining[seq]
            case SequenceStage.DECODING:
                self.batch.leave(seq, grown=True)
        self._free(seq)
        seq.stage = SequenceStage.DONE

    def take_admitted(self) -> list[Sequence]:
        """Returns the sequences that were admitted since the last call. The caller now starts the transfers of those
        that are TRANSFERRING.
        """
        if not self._admitted:
            return []
        admitted, self._admitted = self._admitted, []
        return [
            seq for seq in admitted if seq.stage in (SequenceStage.TRANSFERRING, SequenceStage.PREFILLING)
        ]

    def loaded(self, seq: Sequence) -> None:
        """Notes that the KV of a TRANSFERRING sequence has arrived; the sequence runs from the next step on. If it has
        output tokens already, those are computed first whose KV was not transferred, and always the last one.
        """
        assert seq.stage is SequenceStage.TRANSFERRING
        assert seq.allocation is not None
        del self._loading[seq]
        self.pool.commit(seq.allocation, seq.hashes)
        if seq.generated:
            came = min(seq.remote_output, seq.generated - 1)
            seq.stage, seq.computed = SequenceStage.PREFILLING, seq.prompt_tokens + came
            self._prefilling[seq] = None
            return
        seq.stage = SequenceStage.DECODING
        self._joining[seq] = None

    def begin_step(self) -> float | None:
        """Starts the next step and returns its duration in seconds, or None if nothing can be computed now."""
        steps = self.begin_steps(1)
        return None if steps is None else steps.first_s

    def begin_steps(self, most: int) -> Steps | None:
        """Starts up to `most` steps that `end_steps` may end at once. Returns them; None if nothing can be computed.

        Of several steps only the last may finish a sequence or run out of blocks. A step that computes prompts is
        started alone.
        """
        if self._n_waiting:
            self._admit()
        batch = self.batch
        if self._joining:
            self._join()
        prefill_tokens = self._plan_chunks() if self._prefilling else 0
        if not prefill_tokens and not batch.running:
            return None
        self._in_step = True
        count = 1
        if not prefill_tokens and most > 1:
            count = min(most, batch.steps_to_finish(), 1 + batch.steps_within(self.pool.free))
        first_s = self.timing.step_s(prefill_tokens, len(batch), batch.kv_tokens)
        self._step = first_s, self.timing.decode_per_kv_token_s * len(batch)
        return Steps(count, first_s, self.timing.decode_per_kv_token_s * len(batch), prefill_tokens)

    def end_step(self) -> StepResult:
        """Ends the step that `begin_step` started, and returns its result."""
        return self.end_steps(1)

    def end_steps(self, count: int) -> StepResult:
        """Ends the first `count` (>= 1) of the steps that `begin_steps` started, as if the others had not been started.

        Returns the result of the last of them; the sequences in `decoded` gained a token in each of the `count` steps.
        """
        assert self._in_step, "end_steps without begin_steps"
        self._in_step = False
        batch = self.batch
        self._count_steps(count)
        if count > 1:
            batch.advance(count - 1)
        running = len(batch)
        batch.steps += 1
        batch.kv_tokens += running
        self.decode_tokens_total += running * count
        result = StepResult(decoded=list(batch.running))
        if self._chunks:
            self._end_chunks(result)
        result.finished = batch.take_finished()
        for seq in result.finished:
            batch.leave(seq, grown=False)
            self._free(seq)
            seq.stage = SequenceStage.DONE
        self._grow(result)
        return result

    def _count_steps(self, count: int) -> None:
        """Adds the first `count` of the present steps to the totals. The KV tokens grow by the batch size each step."""
        totals, (first_s, growth_s), n = self.step_totals, self._step, len(self.batch)
        later = count * (count - 1) // 2
        totals.busy_s += count * first_s + later * growth_s
        if self._chunks:
            totals.prefill_steps += 1
            totals.prefill_tokens += sum(chunk for _, chunk in self._chunks)
        if n:
            totals.decode_steps += count
            totals.decode_seqs += count * n
            totals.decode_kv_tokens += count * self.batch.kv_tokens + later * n

    # ------------------------------------------------------------------------------------------------ admission

    def _queue(self, seq: Sequence) -> None:
        seq.stage = SequenceStage.QUEUED
        self._n_waiting += 1
        heapq.heappush(self._waiting, (seq.priority, seq.order, seq))

    def _admit(self) -> None:
        while self._waiting:
            seq = self._waiting[0][2]
            if seq.stage is not SequenceStage.QUEUED:
                heapq.heappop(self._waiting)
                continue
            # A sequence that was preempted or moved here has tokens, and these are computed in a slot.
            most = self.slots + (self.ahead if seq.remote and not seq.generated else 0)
            if self.n_active >= most or not self._allocate(seq):
                return
            heapq.heappop(self._waiting)
            self._n_waiting -= 1
            self._admitted.append(seq)
            if seq.remote:
                seq.stage = SequenceStage.TRANSFERRING
                self._loading[seq] = None
            else:
                seq.stage = SequenceStage.PREFILLING
                self._prefilling[seq] = None

    def _join(self) -> None:
        """Lets the loaded sequences run, as many as there are free slots: all of them without `ahead`."""
        free = self.slots - len(self.batch) - len(self._prefilling)
        for seq in list(self._joining)[: max(0, free)]:
            del self._joining[seq]
            self.batch.enter(seq, first_token=False)

    def _allocate(self, seq: Sequence) -> bool:
        """Takes blocks for the prompt and the tokens generated before a preemption; False if there are too few.

        The last of these tokens is always computed, even if its block is cached.
        """
        tokens = seq.prompt_tokens + seq.generated
        size = self.pool.block_size_tokens
        may_hit = seq.hashes[: (tokens - 1) // size]
        seq.allocation = self.pool.allocate(may_hit, self.pool.blocks_for(tokens))
        if seq.allocation is None:
            return False
        seq.computed = max(seq.allocation.hits * size, seq.lent_tokens)
        seq.cached_tokens = min(seq.computed, seq.prompt_tokens)
        return True

    # ------------------------------------------------------------------------------------------------ prefill

    def _plan_chunks(self) -> int:
        """Plans the prompt chunks of the next step, in order of admission, and returns their tokens in all."""
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
                chunk = todo  # alone, as it exceeds the budget
            self._chunks.append((seq, chunk))
            left -= chunk
            if left <= 0:
                break
        return sum(chunk for _, chunk in self._chunks)

    def _end_chunks(self, result: StepResult) -> None:
        chunks, self._chunks = self._chunks, []
        for seq, chunk in chunks:
            self.prefill_tokens_total += chunk
            if seq.stage is not SequenceStage.PREFILLING:
                continue  # removed while it was computed
            seq.computed += chunk
            if seq.computed < seq.prompt_tokens + seq.generated:
                continue
            assert seq.allocation is not None
            del self._prefilling[seq]
            self.pool.commit(seq.allocation, seq.hashes)
            if seq.prefill_only:
                seq.stage = SequenceStage.LEASED
                result.prefilled.append(seq)
                continue
            seq.stage = SequenceStage.DECODING
            self.batch.enter(seq, first_token=True)
            self.decode_tokens_total += 1
            result.decoded.append(seq)
            result.started.append(seq)

    # ------------------------------------------------------------------------------------------------ decode

    def _grow(self, result: StepResult) -> None:
        """Reserves the blocks that the running sequences need now; while there are too few, preempts a sequence."""
        batch, pool = self.batch, self.pool
        while batch.running and not pool.reserve(batch.growing_now()):
            victim = max(batch.running, key=lambda seq: (seq.priority, seq.order))
            batch.leave(victim, grown=False)
            self._free(victim)
            victim.remote = False  # all its KV is now computed here
            victim.preemptions += 1
            self.preemptions_total += 1
            result.preempted.append(victim)
            self._queue(victim)

    def _free(self, seq: Sequence) -> None:
        if seq.allocation is not None:
            self.pool.release(seq.allocation)
            seq.allocation = None


__all__ = ["EngineModel", "Sequence", "SequenceStage", "StepResult", "Steps"]
