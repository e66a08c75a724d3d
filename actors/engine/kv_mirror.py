"""An engine replica's copy of its prefix cache, and the numbered feed of its changes to the router; without I/O.

The engine reports changes of its cache (`kv_events`). The mirror numbers them in batches and keeps the last batches for
a reader that missed some. It also keeps every cached block with the block before it. A router that has just started, or
that was away for too long, can therefore get the exact chains. Each rank has a mirror, and `epoch` changes when the
engine restarts.
"""

import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from actors.wire.kv import to_wire
from actors.wire.messages import KvEvents, KvReplay, KvState
from policies.engine_model.blocks import BlockHash, Change, Cleared, Removed, Stored

BATCH_BLOCKS = 8_192
"""Blocks in one message: 64 KiB of hashes."""

PART_BLOCKS = 65_536
"""Blocks in one message of a snapshot: 512 KiB of hashes."""

REPLAY_BLOCKS = 131_072
"""Blocks kept for replay: 1 MiB of hashes. ASSUMPTION: for a reader that missed more, a snapshot costs no more."""


class KvMirror:
    """The copy of the prefix cache of rank `rank` of engine `engine_id`. At most `replay_blocks` hashes are kept for
    replay.
    """

    def __init__(self, engine_id: str, rank: int = 0, replay_blocks: int = REPLAY_BLOCKS) -> None:
        self.epoch = secrets.token_hex(8)
        self._engine_id, self._rank = engine_id, rank
        self._next_seq = 0
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self._sent: deque[tuple[KvEvents, int]] = deque()
        self._sent_blocks = 0
        self._replay_blocks = replay_blocks

    @property
    def blocks(self) -> int:
        """Number of cached blocks."""
        return len(self._parents)

    def take(self, changes: Sequence[Change]) -> list[KvEvents]:
        """Applies the engine's changes to the copy, and returns them as the numbered batches for the router."""
        batches = []
        for part, blocks in _batches(changes):
            for change in part:
                self._apply(change)
            batch = KvEvents(self._engine_id, self.epoch, self._next_seq, to_wire(part), self._rank)
            self._next_seq += 1
            self._sent.append((batch, blocks))
            self._sent_blocks += blocks
            batches.append(batch)
        while self._sent_blocks > self._replay_blocks:
            self._sent_blocks -= self._sent.popleft()[1]
        return batches

    def follow(self, changes: Sequence[Change]) -> None:
        """Applies the engine's changes to the copy while no router reads them. Nothing is kept for replay, so a later
        reader gets a snapshot.
        """
        if not changes:
            return
        for change in changes:
            self._apply(change)
        self._next_seq += 1
        self._sent.clear()
        self._sent_blocks = 0

    def answer(self, ask: KvReplay) -> list[KvEvents] | list[KvState]:
        """Returns the batches that the router asks for, or a snapshot of the cache if some of them are no longer
        kept.
        """
        if ask.first is None or ask.epoch != self.epoch or ask.first > self._next_seq:
            return self._state()
        oldest = self._sent[0][0].seq if self._sent else self._next_seq
        if ask.first < oldest:
            return self._state()
        last = self._next_seq if ask.last is None else ask.last
        return [batch for batch, _ in self._sent if ask.first <= batch.seq <= last]

    def chains(self) -> Iterator[Stored]:
        """Yields all cached blocks as runs without a branch. A run comes after the run that holds its parent block."""
        children: dict[BlockHash, list[BlockHash]] = {}
        heads: list[BlockHash] = []
        for block, parent in self._parents.items():
            if parent is None or parent not in self._parents:
                heads.append(block)
            else:
                children.setdefault(parent, []).append(block)
        while heads:
            run = [heads.pop()]
            while len(after := children.get(run[-1], [])) == 1:
                run.append(after[0])
            yield Stored(tuple(run), self._parents[run[0]])
            heads.extend(after)

    def _state(self) -> list[KvState]:
        parts = [part for part, _ in _batches(list(self.chains()), PART_BLOCKS)] or [[]]
        return [
            KvState(self._engine_id, self.epoch, self._next_seq, n, len(parts), to_wire(part), self._rank)
            for n, part in enumerate(parts)
        ]

    def _apply(self, change: Change) -> None:
        match change:
            case Stored():
                parent = change.parent
                for block in change.hashes:
                    self._parents[block] = parent
                    parent = block
            case Removed():
                for block in change.hashes:
                    self._parents.pop(block, None)
            case Cleared():
                self._parents.clear()


def _batches(changes: Iterable[Change], most: int = BATCH_BLOCKS) -> Iterator[tuple[list[Change], int]]:
    """Yields the changes in order, in batches of about `most` blocks, each with its number of blocks. A Cleared counts
    as one block.
    """
    batch: list[Change] = []
    weight = 0
    for change in changes:
        for piece in _pieces(change, most):
            batch.append(piece)
            weight += 1 if isinstance(piece, Cleared) else len(piece.hashes)
            if weight >= most:
                yield batch, weight
                batch, weight = [], 0
    if batch:
        yield batch, weight


def _pieces(change: Change, most: int) -> Iterator[Change]:
    if isinstance(change, Cleared) or len(change.hashes) <= most:
        yield change
        return
    for start in range(0, len(change.hashes), most):
        hashes = change.hashes[start : start + most]
        if isinstance(change, Removed):
            yield Removed(hashes)
        else:
            yield Stored(hashes, change.hashes[start - 1] if start else change.parent)
