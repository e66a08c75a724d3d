"""The batch of running sequences of one engine. A step costs nothing per sequence, because it only changes counters.

    generated tokens of a sequence      steps - offset, where `steps` counts the engine's steps
    KV tokens of the batch              one counter, which grows by the batch size each step
    sequences that finish at a step     a table by step
    blocks needed at a step             a table by step modulo the block size: the KV of token g is written in the step
                                        after it was sampled, so a new block is needed when (prompt + g) mod size = 1

Many steps can therefore be taken at once (`steps_to_finish`, `growth`), with the same counts as one by one. Blocks for
outputs are taken from the pool at once, and added to the sequence's own allocation when it leaves the batch.
"""

import heapq

from policies.engine_model.blocks import BlockPool
from policies.engine_model.sequence import Sequence


class DecodeBatch:
    """The running sequences of one engine; `steps` counts the engine's steps."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.steps = 0
        self.running: dict[Sequence, None] = {}
        self.kv_tokens = 0
        """KV tokens of all running sequences, prompts and outputs."""
        self._size = pool.block_size_tokens
        self._finishing: dict[int, list[Sequence]] = {}
        """Sequences by the step at which they finish. A sequence that has left the batch since has another `due`."""
        self._finish_steps: list[int] = []
        """Heap of the keys of `_finishing`."""
        self._growing: dict[int, int] = {}
        """Number of sequences (never 0) that need a block at a step, by that step modulo the block size."""

    def __len__(self) -> int:
        return len(self.running)

    def generated(self, seq: Sequence) -> int:
        """Returns the number of output tokens that a running sequence has so far."""
        return self.steps - seq.offset

    def enter(self, seq: Sequence, first_token: bool) -> None:
        """Adds a sequence that runs from the next step on. `first_token`: it gained a token in the step just ended."""
        self.running[seq] = None
        seq.offset = self.steps - seq.generated - first_token
        self.kv_tokens += seq.prompt_tokens + seq.generated + first_token
        phase = self._phase(seq)
        self._growing[phase] = self._growing.get(phase, 0) + 1
        seq.due = max(self.steps, seq.offset + seq.output_tokens)
        if seq.due not in self._finishing:
            self._finishing[seq.due] = []
            heapq.heappush(self._finish_steps, seq.due)
        self._finishing[seq.due].append(seq)

    def leave(self, seq: Sequence, grown: bool) -> None:
        """Takes a sequence out and settles its allocation. `grown`: the block that its latest token may need has been
        reserved already.
        """
        seq.generated = self.steps - seq.offset
        del self.running[seq]
        self.kv_tokens -= seq.prompt_tokens + seq.generated
        phase = self._phase(seq)
        self._growing[phase] -= 1
        if not self._growing[phase]:
            del self._growing[phase]
        seq.due = -1
        assert seq.allocation is not None
        written = seq.prompt_tokens + seq.generated - (0 if grown else 1)
        self.pool.settle(seq.allocation, max(seq.allocation.blocks, self.pool.blocks_for(written)))

    def take_finished(self) -> list[Sequence]:
        """Returns the sequences whose last token came in the step just ended; the caller calls `leave` for each."""
        while self._finish_steps and self._finish_steps[0] < self.steps:
            del self._finishing[heapq.heappop(self._finish_steps)]  # all left earlier
        if not self._finish_steps or self._finish_steps[0] != self.steps:
            return []
        due = self._finishing.pop(heapq.heappop(self._finish_steps))
        # a sequence that left and came back may be listed twice
        return [seq for seq in dict.fromkeys(due) if seq.due == self.steps]

    def advance(self, steps: int) -> None:
        """Takes many steps at once. No sequence may finish in them, and the pool must have the blocks for their growth
        (AssertionError).
        """
        blocks = self.growth(steps)
        self.steps += steps
        self.kv_tokens += steps * len(self.running)
        if blocks and not self.pool.reserve(blocks):
            raise AssertionError(f"{blocks} blocks for {steps} steps, {self.pool.free} free")

    # ------------------------------------------------------------------------------------------------- looking ahead

    def steps_to_finish(self) -> int:
        """Returns the number of steps until the next sequence finishes. There must be a running sequence."""
        steps = self._finish_steps
        while not any(seq.due == steps[0] for seq in self._finishing[steps[0]]):
            del self._finishing[heapq.heappop(steps)]  # all left earlier
        return steps[0] - self.steps

    def growing_now(self) -> int:
        """Returns the number of blocks that the running sequences need for the tokens of the step just ended."""
        return self._growing.get(self.steps % self._size, 0)

    def growth(self, steps: int) -> int:
        """Returns the number of blocks that all sequences together need in the next `steps` steps."""
        cycles, rest = divmod(steps, self._size)
        first, size = self.steps + 1, self._size
        blocks = cycles * len(self.running)
        for phase, sequences in self._growing.items():
            if (phase - first) % size < rest:
                blocks += sequences
        return blocks

    def steps_within(self, blocks: int) -> int:
        """Returns the largest number of steps whose growth is at most `blocks`. There must be a running sequence."""
        cycles, left = divmod(blocks, len(self.running))
        first, size = self.steps + 1, self._size
        for wait, sequences in sorted(((phase - first) % size, n) for phase, n in self._growing.items()):
            left -= sequences
            if left < 0:
                return cycles * size + wait
        raise AssertionError("a whole cycle takes a block for every sequence")

    def _phase(self, seq: Sequence) -> int:
        return (1 + seq.offset - seq.prompt_tokens) % self._size
