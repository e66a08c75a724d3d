"""The sim engine's flows of all stages under the permits of its nodes' flow agents, on the event loop.

The rules are those of every worker (`actors.flow.reader`), and so is the line to the agent (`actors.flow.client`). A
task steps it: every millisecond while reads are open, as the thread of a vLLM worker does. An engine that spans several
nodes is a worker of each, because a flow is submitted to the agent of its target. Without agents every flow is posted
whole, at once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.engine.sim.config import SimEngineConfig
from actors.flow.chunks import chunks_of
from actors.flow.client import ReadsClient
from actors.flow.reader import Finished, Post, ReaderConfig
from actors.wire.channel import Identity
from policies.flow.base import Flow

log = logging.getLogger(__name__)

STEP_S = 0.001
REST_S = 0.1
"""Seconds between two steps while reads are open, and otherwise; the agent gives up a worker that is silent for 3 s."""

Move = Callable[[int, int], float | None]
"""Starts to move part `number` of a flow, of a number of bytes. Returns the seconds that the bytes take; None if
`FlowMover.arrived` is called for them."""

Ended = Callable[[float, Finished, str | None], None]
"""Is called when nothing of a flow is on its way any more, with the seconds that it moved, what the reader says of its
end, and why it ended before its last byte (None: it did not, or it was aborted)."""


class PermittedReads:
    """The reads of one engine. `post` starts to move the bytes of a Post and must lead to a call of `chunk_done`;
    `finished` is called once for each read that was submitted. `broken` is called with the id of a read and the error
    that `post` or `finished` raised for it; it ends the read.
    """

    def __init__(
        self,
        client: ReadsClient,
        post: Callable[[Post], None],
        finished: Callable[[Finished], None],
        broken: Callable[[str, Exception], None],
    ) -> None:
        self._client, self._post, self._finished, self._broken = client, post, finished, broken
        self._open: set[str] = set()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        if not client.alone:
            self._task = asyncio.create_task(self._step_always(), name="reads by permit")

    @property
    def connected(self) -> bool:
        """Whether the agent is connected."""
        return self._client.connected

    def submit(self, flow: Flow, hold_bound_s: float) -> None:
        """Takes a read, which is held for at most `hold_bound_s`."""
        self._open.add(flow.flow_id)
        self._work.set()
        self._do(self._client.submit(flow, chunks_of(flow.size), hold_bound_s))

    def chunk_done(self, post: Post, seconds: float | None) -> None:
        """Notes that the bytes of a Post have arrived after `seconds`, or never will because their sender has gone
        (None).
        """
        self._do(self._client.chunk_done(post, seconds))

    def abort(self, flow_id: str) -> None:
        """Posts nothing more of a read; `finished` follows when what is posted has arrived."""
        self._do(self._client.abort(flow_id))

    def advanced(self, flow_id: str, rli: int) -> None:
        """Notes a read's relative layer index after a group of layers has ended."""
        self._client.advanced(flow_id, rli)

    def stop(self) -> None:
        """Ends the line to the agent. Nothing is posted or reported any more."""
        if self._task is not None:
            self._task.cancel()
        self._client.close()

    def _do(self, actions: list[Post | Finished]) -> None:
        """Carries actions out. An error ends the read that it is of and no other."""
        for action in actions:
            try:
                if isinstance(action, Post):
                    self._post(action)
                else:
                    self._open.remove(action.flow_id)
                    self._finished(action)
            except Exception as error:
                log.exception("the read %s ends by an error", action.flow_id)
                self._broken(action.flow_id, error)

    async def _step_always(self) -> None:
        while True:
            try:
                self._do(self._client.step())
            except Exception:
                # without further steps every read that is held, now or later, would wait without end
                log.exception("the reads by permit go on after an error")
            if self._open:
                await asyncio.sleep(STEP_S)
                continue
            self._work.clear()
            # `wait_for` of Python 3.11 forgets that it was cancelled if work comes in the same turn of the loop
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REST_S):
                    await self._work.wait()


@dataclass(slots=True, eq=False)
class _Open:
    """A flow under way: how its bytes move, when it was submitted, and its parts on their way by their number."""

    flow: Flow
    move: Move
    ended: Ended
    begun_s: float
    posts: dict[int, Post] = field(default_factory=dict)
    timers: dict[int, asyncio.TimerHandle] = field(default_factory=dict)
    posted: int = 0
    reason: str | None = None


class FlowMover:
    """All flows of one engine, of any stage, whose bytes move in parts: a part for each permit. Without `permits` each
    is posted whole, at once, whether there are agents or not.
    """

    def __init__(self, config: SimEngineConfig, permits: bool = True) -> None:
        self._config, self._permits = config, permits
        self._reads: dict[str, PermittedReads] = {}
        self._flows: dict[str, _Open] = {}
        self._stopped = False

    @property
    def connected(self) -> bool:
        """Whether the agents of all nodes are connected."""
        return all(reads.connected for reads in self._reads.values())

    def attach(self, me: Identity) -> None:
        """Connects to the agents of the engine's nodes. Must be called in the event loop, before the first flow."""
        self._loop = asyncio.get_running_loop()
        for node in self._config.nodes:
            worker = self._config.engine_id if node == self._config.flow_node else f"{me.id}@{node}"
            config = ReaderConfig(self._config.flow_silent_s)
            agent = self._config.agent_of(node) if self._permits else ""
            client = ReadsClient(agent, node, worker, me.secret, config)
            self._reads[node] = PermittedReads(client, self._post, self._finished, self._broken)

    def stop(self) -> None:
        """Ends all flows. Nothing is reported any more."""
        self._stopped = True
        for reads in self._reads.values():
            reads.stop()
        for flow in self._flows.values():
            for timer in flow.timers.values():
                timer.cancel()

    def submit(self, flow: Flow, hold_bound_s: float, move: Move, ended: Ended) -> None:
        """Takes a flow into one of the engine's nodes. `ended` is called once, which may be before this returns."""
        self._flows[flow.flow_id] = _Open(flow, move, ended, self._loop.time())
        self._reads[flow.target].submit(flow, hold_bound_s)

    def advanced(self, flow_id: str, rli: int) -> None:
        """Notes a flow's relative layer index. Does nothing for a flow that has ended."""
        found = self._flows.get(flow_id)
        if found is not None:
            self._reads[found.flow.target].advanced(flow_id, rli)

    def abort(self, flow_id: str) -> None:
        """Posts nothing more of a flow, which ends when what is on its way has arrived. Ignores one that has ended."""
        found = self._flows.get(flow_id)
        if found is not None:
            self._reads[found.flow.target].abort(flow_id)

    def break_off(self, flow_id: str, reason: str) -> None:
        """Ends a flow whose sender has gone: what is on its way will not arrive. Ignores one that has ended."""
        found = self._flows.get(flow_id)
        if found is None:
            return
        found.reason = reason
        posts, found.posts = list(found.posts.values()), {}
        for timer in found.timers.values():
            timer.cancel()
        reads = self._reads[found.flow.target]
        reads.abort(flow_id)
        for post in posts:
            reads.chunk_done(post, None)

    def arrived(self, flow_id: str, number: int, seconds: float) -> None:
        """Notes that part `number` has arrived, `seconds` after it was posted. Ignores a part that is not awaited."""
        found = self._flows.get(flow_id)
        post = None if found is None else found.posts.pop(number, None)
        if found is not None and post is not None and not self._stopped:
            found.timers.pop(number, None)
            self._reads[found.flow.target].chunk_done(post, seconds)

    def _post(self, post: Post) -> None:
        found = self._flows[post.flow_id]
        number, found.posted = found.posted, found.posted + 1
        found.posts[number] = post
        seconds = found.move(number, post.size)
        if seconds is not None:
            found.timers[number] = self._loop.call_later(seconds, self.arrived, post.flow_id, number, seconds)

    def _broken(self, flow_id: str, error: Exception) -> None:
        self.break_off(flow_id, f"the read broke down: {error}")

    def _finished(self, finished: Finished) -> None:
        if self._stopped:
            return
        found = self._flows.pop(finished.flow_id)
        busy_s = max(0.0, self._loop.time() - found.begun_s - finished.held_s)
        found.ended(busy_s, finished, found.reason)
