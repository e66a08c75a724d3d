"""The thread of a vLLM worker that reads KV: it posts the chunks for which it has permits, polls them, checks what was
read, and reports.

vLLM's connector runs once an engine step, which takes 55 to 130 ms on a CPU; a permit that waited for a step would cost
more than the chunk. The thread shares NIXL's agent with the step's thread (`transfer.tuned_agents`). It alone touches
the transfers of chunks, lease tables and checksums; the step's thread only sees a read's state.

    step's thread                       this thread
    submit(read)  ------------------->  cut into chunks, submitted to the flow agent (`actors.flow`)
                                        post, poll, report, chunk by chunk
                                        check the lease, and the checksums (`read_check`)
    read.state == "DONE"  <-----------  end
    advance(request, rli)  ---------->  the agent hears that the request's reads are needed sooner
    abort(request)  ----------------->  nothing more is posted; ends behind the chunk in flight

Without an agent's address every read is one chunk that is posted at once.
"""

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

from vllm.logger import init_logger

from actors.engine.vllm.connector.chunked_read import ChunkedRead
from actors.engine.vllm.connector.chunked_read import Post as Piece
from actors.engine.vllm.connector.read_check import ReadChecks
from actors.flow.chunks import CHUNK_BYTES
from actors.flow.client import ReadsClient
from actors.flow.reader import Finished, Post
from policies.flow.base import Flow, Stage

logger = init_logger(__name__)

POLL_S = 0.0005
"""Least pause between two polls of what is in flight. Chunks take 10 ms; NIXL's own thread naps for 1 ms on CPU
engines."""

LONGEST_POLL_S = 0.020
"""Longest pause between two polls. A read that is stuck would else be polled a thousand times a second."""

POLL_GROWTH = 0.02
"""Pause as a share of the time in which nothing ended: it adds 2 % to that time, and is longest after one second."""

IDLE_S = 0.4
"""Longest wait of a thread that reads nothing. The flow agent gives up a worker that is silent for 3 s."""

_TROUBLE_S = 0.05
_STOP_S = 5.0


class FlowThread:
    """The reads of one worker. `submit`, `advance`, `abort` and `stop` may be called from any thread."""

    def __init__(
        self,
        checks: ReadChecks,
        client: ReadsClient,
        name: str,
        scheduled: bool,
        clock: Callable[[], float] = time.monotonic,
        begin: Callable[[], None] | None = None,
    ) -> None:
        self.checks = checks
        self._set_up = begin
        self._client = client
        self._name = name
        self._scheduled = scheduled
        self._clock = clock
        self._number = 0
        self._commands: collections.deque[ChunkedRead | tuple[str, int] | str] = collections.deque()
        self._reads: dict[str, ChunkedRead] = {}
        self._posts: dict[Piece, tuple[str, Post]] = {}
        self._progress_s = clock()
        self._stopping = False
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="sluice-flow", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ the step's thread

    def submit(self, read: ChunkedRead) -> None:
        """Reads, as soon as there is a permit. The read's state says when it has ended; after `stop` it fails."""
        read.submitted_s = self._clock()
        if self._stopping:
            read.drop()
        else:
            self._command(read)

    def advance(self, request_id: str, rli: int) -> None:
        """Lowers the relative layer index of this request's reads. Does nothing for reads that have ended."""
        self._command((request_id, rli))

    def abort(self, request_id: str) -> None:
        """Posts nothing more for this request; its reads end behind the chunks in flight."""
        self._command(request_id)

    def stop(self) -> None:
        """Ends the thread, and then the reads that are open as failed. Idempotent."""
        self._stopping = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join(_STOP_S)

    def _command(self, command: ChunkedRead | tuple[str, int] | str) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        # A full pipe wakes the thread as well.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")

    # ------------------------------------------------------------------------------------------------ this thread

    def _run(self) -> None:
        try:
            if self._set_up is not None:
                self._set_up()
        except Exception:
            logger.exception("The thread that reads KV could not be set up, and reads all the same.")
        while not self._stopping:
            try:
                self._turn()
                self._wait()
            except Exception:
                logger.exception("The thread that reads KV goes on after an error.")
                time.sleep(_TROUBLE_S)
        for read in [*self._reads.values(), *(c for c in self._commands if isinstance(c, ChunkedRead))]:
            read.drop()
        self._client.close()

    def _turn(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, ChunkedRead):
                self._begin(command)
            elif isinstance(command, tuple):
                self._advance(*command)
            else:
                self._abort(command)
        # Ended reads are reported before the agent's answers are read, which frees their ports that much earlier.
        self._poll()
        self._carry_out(self._client.step())
        now_s = self._clock()
        for read, refused in self.checks.poll(now_s):
            self._end(read, refused)

    def _wait(self) -> None:
        if self._commands:
            return
        if self._posts or len(self.checks):
            timeout_s = poll_pause_s(self._clock() - self._progress_s)
        elif self._reads or self._scheduled or self.checks.overdue:
            timeout_s = IDLE_S
        else:
            timeout_s = 60.0
        self._client.wait(timeout_s, self._wake_r)
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._wake_r, 4096)) == 4096:
                pass

    def _begin(self, read: ChunkedRead) -> None:
        self._number += 1
        flow_id = f"{self._name}/{self._number}"
        self._reads[flow_id] = read
        terms = read.terms.flow
        try:
            flow = Flow(
                flow_id=flow_id,
                request_id=read.terms.request_id,
                batch=terms.batch or read.terms.request_id,
                stage=Stage(terms.stage),
                source=terms.source or read.terms.source.agent,
                target=terms.target or self._name,
                size=read.bytes,
                due_s=terms.due_s,
                rli=terms.rli,
                compute_s=terms.compute_s,
                engines=f"{read.terms.source.agent}>{self._name}",
            )
            sizes = read.sizes()
            if self._scheduled:
                sizes = read.divide(CHUNK_BYTES)
            todo = self._client.submit(flow, sizes, terms.hold_s)
        except Exception as error:
            read.fail(error)
            self._end_flow(flow_id, "")
            return
        self._carry_out(todo)

    def _advance(self, request_id: str, rli: int) -> None:
        for flow_id in self._flows_of(request_id):
            self._client.advanced(flow_id, rli)

    def _flows_of(self, request_id: str) -> list[str]:
        return [key for key, read in self._reads.items() if read.terms.request_id == request_id]

    def _abort(self, request_id: str) -> None:
        for flow_id in self._flows_of(request_id):
            self._reads[flow_id].abort()
            self._carry_out(self._client.abort(flow_id))

    def _carry_out(self, actions: Sequence[Post | Finished]) -> None:
        todo = collections.deque(actions)
        while todo:
            action = todo.popleft()
            if isinstance(action, Finished):
                self._finished(action)
                continue
            read = self._reads[action.flow_id]
            piece = read.post(action.first_chunk, action.n_chunks, self._clock())
            if piece is not None:
                self._posts[piece] = (action.flow_id, action)
                self._progress_s = piece.posted_s
            else:
                todo += self._client.abort(action.flow_id)
                todo += self._client.chunk_done(action, None)

    def _poll(self) -> None:
        now_s = self._clock()
        for flow_id in {flow_id for flow_id, _ in self._posts.values()}:
            read = self._reads[flow_id]
            for piece in read.poll(now_s):
                _, post = self._posts.pop(piece)
                self._progress_s = now_s
                if piece.failed:
                    self._carry_out(self._client.abort(flow_id))
                    self._carry_out(self._client.chunk_done(post, None))
                else:
                    self.checks.heard(read.terms.source.agent, now_s)
                    self._carry_out(self._client.chunk_done(post, piece.ended_s - piece.posted_s))

    def _finished(self, finished: Finished) -> None:
        read = self._reads[finished.flow_id]
        if self._scheduled:
            read.unscheduled = finished.unscheduled or ""
            read.permit_wait_s, read.level = finished.held_s, finished.level
        if read.whole and not read.aborted and read.error is None:
            self.checks.begin(read, self._clock())
        else:
            self._end_flow(finished.flow_id, "")

    def _end(self, read: ChunkedRead, refused: str) -> None:
        for flow_id in [key for key, other in self._reads.items() if other is read]:
            self._end_flow(flow_id, refused)

    def _end_flow(self, flow_id: str, refused: str) -> None:
        read = self._reads.pop(flow_id)
        if read.error is not None:
            logger.warning("A read of KV for request %s has failed: %s", read.terms.request_id, read.error)
        if refused:
            logger.warning("KV of request %s must not be used: %s.", read.terms.request_id, refused)
        read.end(self._clock(), refused)


def poll_pause_s(quiet_s: float) -> float:
    """Returns the pause before the next poll, in seconds, if nothing has been posted or ended for `quiet_s`."""
    return min(LONGEST_POLL_S, max(POLL_S, POLL_GROWTH * quiet_s))
