"""One read of a request's KV from one remote worker, posted in chunks (MFS 4.5: chunks bound how long an urgent flow
waits for what was posted before it).

vLLM's index lists go layer by layer, so a chunk is a slice of them: a group of layers, or a range of blocks of one
layer. vLLM holds the read as it holds a NIXL handle, and sees it as under way (`PROC`) until its last chunk has ended
and what was read has been checked.

A chunk that has been posted is never cancelled, because NIXL cannot say when a read that it cancels stops writing.
After an abort, or after an error, nothing more is posted; the read ends behind the chunks in flight, and only then does
vLLM free its blocks.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from actors.engine.vllm.connector.integrity import SumsAt
from actors.engine.vllm.connector.lease_table import Source
from actors.flow.chunks import MOST_CHUNKS

State = Literal["PROC", "DONE", "ERR"]
Indices = npt.NDArray[np.int32]
Blocks = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowTerms:
    """Terms of a read for a flow scheduler, beside its bytes. `due_s` and `hold_s` are seconds from the read's
    submission: its deadline (None if it is implicit), and the longest hold.
    """

    source: str = ""
    target: str = ""
    batch: str = ""
    stage: int = 3
    rli: int = 0
    compute_s: float = 0.0
    due_s: float | None = None
    hold_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The lease under which a remote worker lends its blocks: where its table is, what must be in it, and the worker's
    table of checksums, if it has one.
    """

    table: int
    slot: int
    generation: int
    sums: SumsAt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTerms:
    """Owner and terms of a read: its request, the worker that it reads from, its lease (None: unknown, so the read is
    not checked), and its terms for a flow scheduler.
    """

    request_id: str
    source: Source
    lease: Lease | None = None
    flow: FlowTerms = field(default_factory=FlowTerms)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Totals of a read that has ended, under the names that NIXL gives them. Durations are in microseconds."""

    xferDuration: float
    postDuration: float
    totalBytes: int
    descCount: int


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a read: NIXL's descriptor list, the indices in it, and for the local side the list's addresses and
    lengths ([descriptors, 3], as vLLM describes them to NIXL; empty for a remote side). `asked` are the indices as vLLM
    paired them, by which the read is checked. `extent` is the number of descriptors of the list and the bytes of them
    all.
    """

    descriptors: Any
    indices: Indices
    asked: Indices
    blocks: Blocks
    extent: tuple[int, int]


@dataclass(eq=False, slots=True)
class Post:
    """Chunks `first` to `first + count - 1`, posted together."""

    handle: Any
    first: int
    count: int
    bytes: int
    posted_s: float
    ended_s: float = 0.0
    failed: bool = False


def cut(lengths: npt.NDArray[np.int64], chunk_bytes: float) -> list[int]:
    """Returns the ends (exclusive, as positions in the index lists) of chunks of nearly equal size, `chunk_bytes` at
    most if a descriptor is not longer. `lengths` has the bytes of each descriptor and is not empty.
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    number = min(MOST_CHUNKS, len(lengths), max(1, -int(-total // max(1.0, chunk_bytes))))
    wanted = np.arange(1, number + 1) * total / number
    # Rounding of `wanted` must not leave the last descriptor out.
    positions = np.minimum(np.searchsorted(ends, wanted - 0.5) + 1, len(lengths))
    return [int(position) for position in np.unique(positions)]


class ChunkedRead:
    """A read in chunks. One thread calls `post`, `poll`, `abort`, `fail` and `end`; any thread may read `state`, and
    once it is not "PROC", call the rest.
    """

    def __init__(self, agent: Any, terms: ReadTerms, local: Side, remote: Side) -> None:
        self.terms = terms
        self.local = local
        self.remote = remote
        self.lengths = local.blocks[local.indices, 1].astype(np.int64)
        self.bytes = int(self.lengths.sum())
        self.state: State = "PROC"
        self.refused = ""
        """Why what was read must not be used; empty if it may be."""
        self.permit_wait_s = 0.0
        """Seconds in which it waited for permits with nothing in flight; 0 if there is no flow scheduler."""
        self.level: int | None = None
        """The lowest priority level (the largest number) of its permits; None if it had none."""
        self.unscheduled = ""
        """Why a part was read without a permit; empty if it was not, or if there is no flow scheduler."""
        self.aborted = False
        self.error: Exception | None = None
        self.in_flight: list[Post] = []
        self.busy_s = 0.0
        """Seconds in which a chunk was in flight."""
        self.read_bytes = 0
        self.descriptors = 0
        self.chunks_done = 0
        self.submitted_s: float | None = None
        """Time at which it was given to the thread that reads; None before that."""
        self.ended_s = 0.0
        self._agent = agent
        self._cuts: list[int] = [0, len(self.lengths)]
        self._offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self._post_s = 0.0
        self._busy_until_s = 0.0
        self._unreleased: list[Any] = []

    # ------------------------------------------------------------------------------------- the thread that reads

    def divide(self, chunk_bytes: float) -> list[int]:
        """Cuts the read into chunks, and returns their bytes. Before that the read is one chunk."""
        self._cuts = [0, *cut(self.lengths, chunk_bytes)]
        return self.sizes()

    def sizes(self) -> list[int]:
        """Returns the bytes of each chunk."""
        sizes: list[int] = np.diff(self._offsets[self._cuts]).tolist()
        return sizes

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self._cuts) - 1

    @property
    def whole(self) -> bool:
        """Whether all chunks have ended well."""
        return self.chunks_done == self.chunks

    @property
    def over(self) -> bool:
        """Whether nothing is in flight and nothing more will be posted."""
        return not self.in_flight and (self.whole or self.aborted or self.error is not None)

    def post(self, first: int, count: int, now_s: float) -> Post | None:
        """Posts chunks `first` to `first + count - 1`, and returns them unless NIXL refused: then the read has failed.
        Of a read that was aborted or has failed nothing is posted.
        """
        if self.aborted or self.error is not None:
            return None
        begin, end = self._cuts[first], self._cuts[first + count]
        handle = None
        try:
            handle = self._agent.make_prepped_xfer(
                "READ",
                self.local.descriptors,
                self.local.indices[begin:end],
                self.remote.descriptors,
                self.remote.indices[begin:end],
            )
            if self._agent.transfer(handle) == "ERR":
                raise RuntimeError(f"NIXL refused chunks {first} to {first + count - 1} of the read")
        except Exception as error:
            if handle is not None:
                self._unreleased.append(handle)
            self.fail(error)
            return None
        post = Post(handle, first, count, int(self._offsets[end] - self._offsets[begin]), now_s)
        self.in_flight.append(post)
        self._busy_until_s = max(self._busy_until_s, now_s)
        return post

    def poll(self, now_s: float) -> list[Post]:
        """Returns the posts that have ended since the last call, well or not. An error of NIXL's fails the read."""
        if not self.in_flight:
            return []
        self.busy_s += max(0.0, now_s - self._busy_until_s)
        self._busy_until_s = now_s
        ended = []
        for post in list(self.in_flight):
            try:
                state = self._agent.check_xfer_state(post.handle)
                if state == "PROC":
                    continue
                if state != "DONE":
                    raise RuntimeError(f"NIXL's state of a chunk is {state}")
                self._take(post)
            except Exception as error:
                post.failed = True
                self._unreleased.append(post.handle)
                self.fail(error)
            post.ended_s = now_s
            self.in_flight.remove(post)
            ended.append(post)
        return ended

    def _take(self, post: Post) -> None:
        telemetry = self._agent.get_xfer_telemetry(post.handle)
        self._agent.release_xfer_handle(post.handle)
        self.read_bytes += post.bytes
        self.chunks_done += post.count
        if telemetry is not None:
            self.descriptors += telemetry.descCount
            self._post_s += telemetry.postDuration / 1e6

    def abort(self) -> None:
        """Posts nothing more, because nobody wants the read any longer."""
        self.aborted = True

    def fail(self, error: Exception) -> None:
        """Posts nothing more, because the read has failed. The first error is kept."""
        self.error = self.error or error

    def end(self, now_s: float, refused: str = "") -> None:
        """Ends the read. `refused` says why what was read must not be used. The caller sees that nothing is in flight
        (`over`).
        """
        self.ended_s = now_s
        self.refused = refused
        self.state = "ERR" if self.error is not None else "DONE"

    def drop(self) -> None:
        """Ends the read as it is, because its thread ends: NIXL cancels what is in flight when it is released."""
        self.fail(RuntimeError("the thread that reads has ended"))
        self._unreleased += [post.handle for post in self.in_flight]
        self.in_flight = []
        self.state = "ERR"

    def held_s(self, now_s: float) -> float:
        """Returns the seconds since the submission in which nothing was in flight."""
        if self.submitted_s is None:
            return 0.0
        return max(0.0, (self.ended_s or now_s) - self.submitted_s - self.busy_s)

    # ------------------------------------------------------------------------------------------ vLLM's own thread

    def telemetry(self) -> Telemetry | None:
        """Returns the read's totals, or None if nothing was read."""
        if not self.chunks_done:
            return None
        return Telemetry(self.busy_s * 1e6, self._post_s * 1e6, self.read_bytes, self.descriptors)

    def release(self) -> None:
        """Releases what NIXL still holds. Raises RuntimeError while chunks may be in flight, and NIXL's errors; vLLM
        then keeps the read and its blocks. Of a read that was never submitted nothing can be in flight.
        """
        if self.state == "PROC" and self.submitted_s is not None:
            raise RuntimeError("chunks of the read are still to come; it is released when it has ended")
        while self._unreleased:
            self._agent.release_xfer_handle(self._unreleased[-1])
            self._unreleased.pop()
