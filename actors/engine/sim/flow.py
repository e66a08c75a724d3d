"""The sim engine's reads under the permits of its node's flow agent, on the event loop.

The rules are those of every worker (`actors.flow.reader`), and so is the line to the agent (`actors.flow.client`). A
task steps it: every millisecond while reads are open, as the thread of a vLLM worker does.
"""

import asyncio
from collections.abc import Callable

from actors.flow.client import ReadsClient
from actors.flow.reader import Finished, Post
from policies.flow.base import Flow

STEP_S = 0.001
REST_S = 0.1
"""Seconds between two steps while reads are open, and otherwise; the agent gives up a worker that is silent for 4 s."""

CHUNK_S = 0.010
"""Seconds that a chunk takes at the bandwidth of its source as it was seen last (docs/design.md 5)."""

MOST_CHUNKS = 256
"""Most chunks of one read, so that a large read on a slow link does not make thousands of messages."""


class PermittedReads:
    """The reads of one engine. `post` starts to move the bytes of a Post and must lead to a call of `chunk_done`;
    `finished` is called once for each read that was submitted.
    """

    def __init__(
        self,
        client: ReadsClient,
        bytes_per_s: float,
        post: Callable[[Post], None],
        finished: Callable[[Finished], None],
    ) -> None:
        self._client, self._post, self._finished = client, post, finished
        self._bytes_per_s = bytes_per_s
        self._seen: dict[str, float] = {}
        """Bytes/s of the last chunk from each source."""
        self._sources: dict[str, str] = {}
        """The source of each open read."""
        self._work = asyncio.Event()
        self._task = asyncio.create_task(self._step_always(), name="reads by permit")

    def submit(self, flow: Flow, hold_bound_s: float) -> None:
        """Takes a read, which is held for at most `hold_bound_s`."""
        self._sources[flow.flow_id] = flow.source
        self._work.set()
        self._do(self._client.submit(flow, self._chunks(flow), hold_bound_s))

    def chunk_done(self, post: Post, seconds: float) -> None:
        """Notes that the bytes of a Post have arrived after `seconds`, or never will because their sender has gone."""
        if seconds > 0:
            self._seen[self._sources[post.flow_id]] = post.size / seconds
        self._do(self._client.chunk_done(post, seconds))

    def abort(self, flow_id: str) -> None:
        """Posts nothing more of a read; `finished` follows when what is posted has arrived."""
        self._do(self._client.abort(flow_id))

    def stop(self) -> None:
        """Ends the line to the agent. Nothing is posted or reported any more."""
        self._task.cancel()
        self._client.close()

    def _chunks(self, flow: Flow) -> list[int]:
        at_bytes_per_s = self._seen.get(flow.source, self._bytes_per_s)
        size = max(1, int(at_bytes_per_s * CHUNK_S), -(-flow.size // MOST_CHUNKS))
        whole, rest = divmod(flow.size, size)
        return [size] * whole + ([rest] if rest else [])

    def _do(self, actions: list[Post | Finished]) -> None:
        for action in actions:
            if isinstance(action, Post):
                self._post(action)
            else:
                del self._sources[action.flow_id]
                self._finished(action)

    async def _step_always(self) -> None:
        while True:
            self._do(self._client.step())
            if self._sources:
                await asyncio.sleep(STEP_S)
                continue
            self._work.clear()
            try:
                await asyncio.wait_for(self._work.wait(), REST_S)
            except TimeoutError:
                pass
