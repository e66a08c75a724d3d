"""Scheduled reads for a thread: a `Reader` with a line to the agent, and nothing that blocks or needs an event loop.

    reads = ReadsClient("unix:/run/flow.sock", node="n1", worker="decode-1")
    do = reads.submit(flow, chunk_sizes, hold_bound_s)     # list of Post and Finished
    do = reads.step()                                      # often: every millisecond while something is open
    do = reads.chunk_done(post, seconds)
    reads.wait(0.2, wake_fd)                               # when there is nothing to poll

Each call returns what the thread must do now. With an empty address every read is posted at once, whole.
"""

import select
import time
from collections.abc import Callable, Sequence

from actors.flow.line import Line, Peer, Turn, wait_readable
from actors.flow.reader import Action, Finished, Post, Reader, ReaderConfig, Send
from actors.wire.messages import JoinNode
from policies.flow.base import Flow

SLICE_S = 0.005
"""Seconds that one step counts at most as running time of the thread: a step that comes later shows that the thread or
the whole process stood still. It is the period of the agent's beats."""


class ReadsClient:
    """The reads of one worker. All calls come from one thread."""

    def __init__(
        self,
        address: str,
        node: str,
        worker: str,
        secret: bytes | None = None,
        config: ReaderConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reader = Reader(config)
        self._line = Line(Peer(address, worker, secret)) if address else None
        self._node = node
        self._clock = clock
        self._stepped_s = clock()

    @property
    def connected(self) -> bool:
        """Whether reads are scheduled by an agent at present."""
        return self._line is not None and self._line.up

    @property
    def alone(self) -> bool:
        """Whether there is no agent, so that nothing is ever held."""
        return self._line is None

    @property
    def line_reason(self) -> str:
        """Why the last connection ended, for logs; empty if none has."""
        return "" if self._line is None else self._line.reason

    def submit(self, flow: Flow, chunks: Sequence[int], hold_bound_s: float) -> list[Post | Finished]:
        """Takes a read, as `Reader.submit` does."""
        return self._carry_out(self.reader.submit(flow, chunks, hold_bound_s, self._clock()))

    def chunk_done(self, post: Post, seconds: float | None) -> list[Post | Finished]:
        """Notes that the chunks of `post` have arrived after `seconds`, or have failed after an `abort` (None)."""
        return self._carry_out(self.reader.chunk_done(post, seconds, self._clock()))

    def abort(self, flow_id: str) -> list[Post | Finished]:
        """Posts nothing more of a read. Does nothing for one that is over."""
        return self._carry_out(self.reader.abort(flow_id, self._clock()))

    def advanced(self, flow_id: str, rli: int) -> None:
        """Notes a read's relative layer index, as `Reader.advanced` does."""
        self._carry_out(self.reader.advanced(flow_id, rli))

    def step(self) -> list[Post | Finished]:
        """Reads the agent's messages and lets time pass. Called every millisecond or so while reads are open, and at
        least every half second, because the agent gives a worker up that is silent for 3 s (`actors.wire.channel`).
        """
        now_s = self._clock()
        lived_s = min(now_s - self._stepped_s, SLICE_S)
        self._stepped_s = now_s
        if self._line is None:
            return []
        actions: list[Action] = []
        for happened in self._line.pump(now_s, lived_s):
            if happened is Turn.UP:
                actions += [Send(JoinNode(self._node)), *self.reader.joined(now_s)]
            elif happened is Turn.DOWN:
                self.reader.lost()
            else:
                actions += self.reader.received(happened, now_s)
        actions += self.reader.tick(now_s, lived_s)
        return self._carry_out(actions)

    def wait(self, timeout_s: float, *also: int) -> None:
        """Waits for the agent, for a readable descriptor of `also`, or for `timeout_s`: at most a beat's period while a
        read is held.
        """
        most_s = min(timeout_s, SLICE_S) if self.reader.waits else timeout_s
        if self._line is not None:
            self._line.wait(most_s, *also)
        else:
            wait_readable(dict.fromkeys(also, select.POLLIN), most_s)

    def close(self) -> None:
        """Closes the line. Reads that are open are not finished by this."""
        if self._line is not None:
            self._line.close()

    def _carry_out(self, actions: Sequence[Action]) -> list[Post | Finished]:
        sent = [action.message for action in actions if isinstance(action, Send)]
        if sent and self._line is not None:
            self._line.send(sent)
            self._line.flush()
        return [action for action in actions if not isinstance(action, Send)]
