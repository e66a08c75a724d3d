"""Reads of single pieces from one source: in chunks, by permits of the node's flow agent, where there is one.

A piece is a flow of stage `Stage.WEIGHTS`, which waits for all others. A chunk that has been posted is never cancelled,
because NIXL cannot say when a read that it cancels stops writing. A source that is given up with chunks under way keeps
its agent, and with it the memory into which they are read, until they have ended (`rest`).
"""

import asyncio
import collections
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors.engine.weights.checkpoint import Bytes
from actors.engine.weights.pages import PagesAgent, PagesError
from actors.flow.chunks import FLOOR_BYTES_PER_S, chunks_of
from actors.flow.client import ReadsClient
from actors.flow.reader import Finished, Post
from actors.wire.messages import PieceLent
from policies.flow.base import Flow, Stage

HOLD_S = 10.0
READ_S = 10.0
"""Longest wait for permits in seconds, and longest time of a piece beside that for its bytes. ASSUMPTION: a lender that
is busy answers within the latter."""

END_S = 2.0
"""Seconds in which chunks that are under way when a source is given up may still end before the next one is tried."""

POLL_S = 0.001
REST_S = 0.5
"""Seconds between two looks at chunks under way, and at those of a source that was given up."""


@dataclass(eq=False, slots=True)
class _Chunk:
    """Chunks that were posted together."""

    post: Post
    handle: Any
    posted_s: float


def limit_s(size: int) -> float:
    """Returns the longest time in seconds that a piece of `size` bytes may take."""
    return HOLD_S + READ_S + size / FLOOR_BYTES_PER_S


class ChunkReads:
    """The reads of pieces from one source, one at a time. `agent` is this source's alone. `names` are the names of the
    source's and of this node, as flow agents know them.
    """

    def __init__(self, agent: PagesAgent, lender: str, reads: ReadsClient, names: tuple[str, str]) -> None:
        self._agent, self._lender, self._reads, self._names = agent, lender, reads, names
        self._flying: list[_Chunk] = []
        self._numbers = itertools.count()

    async def read(self, lent: PieceLent, into: Bytes, gone: Callable[[], str]) -> None:
        """Reads a piece. Raises PagesError if that fails, takes too long, or if `gone` says why the source has gone."""
        self._agent.learn(lent.pages)
        held = self._agent.hold(into)
        flow_id = f"{self._agent.name}/{next(self._numbers)}"
        flow = Flow(
            flow_id=flow_id,
            request_id=flow_id,
            batch=flow_id,
            stage=Stage.WEIGHTS,
            source=self._names[0],
            target=self._names[1],
            size=len(into),
            engines=f"{self._lender}>{self._agent.name}",
        )
        sizes = [len(into)] if self._reads.alone else chunks_of(len(into))
        begins = [0, *itertools.accumulate(sizes)]
        todo = collections.deque(self._reads.submit(flow, sizes, HOLD_S))
        until_s, failed, finished = time.monotonic() + limit_s(len(into)), "", False
        while todo or self._flying or not finished:
            while todo:
                action = todo.popleft()
                if isinstance(action, Finished):
                    finished = True
                    continue
                at = begins[action.first_chunk]
                try:
                    handle = self._agent.read(self._lender, lent.address + at, into[at : at + action.size])
                    self._flying.append(_Chunk(action, handle, time.monotonic()))
                except PagesError as error:
                    failed = failed or str(error)
                    todo += [*self._reads.abort(flow_id), *self._reads.chunk_done(action, None)]
            for chunk, took_s in self._ended():
                if took_s is None:
                    failed = failed or "the read has failed"
                    todo += self._reads.abort(flow_id)
                todo += self._reads.chunk_done(chunk.post, took_s)
            todo += self._reads.step()
            now_s = time.monotonic()
            if not failed:
                failed = gone() or ("the read takes too long" if now_s > until_s else "")
                if failed:
                    until_s = now_s + END_S
                    todo += self._reads.abort(flow_id)
            elif now_s > until_s:
                break
            if not todo:
                await asyncio.sleep(POLL_S)
        if failed:
            raise PagesError(failed)
        self._agent.drop(held)

    def _ended(self) -> list[tuple[_Chunk, float | None]]:
        """Returns the chunks that have ended, with the seconds that they took; None for one that has failed."""
        ended: list[tuple[_Chunk, float | None]] = []
        now_s = time.monotonic()
        for chunk in list(self._flying):
            state = self._agent.state(chunk.handle)
            if state == "PROC" or not self._agent.release(chunk.handle):
                continue
            self._flying.remove(chunk)
            took_s = now_s - chunk.posted_s
            ended.append((chunk, took_s if state == "DONE" else None))
        return ended

    async def rest(self) -> None:
        """Waits until nothing is read any more, however long that takes, and then ends the agent."""
        while self._flying:
            self._ended()
            await asyncio.sleep(REST_S)
        self._agent.close()
