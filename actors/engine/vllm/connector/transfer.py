"""The worker's control of NIXL while it pulls KV: the request that a transfer belongs to, the chunks in which it is
read, and the data that it moved.

`TransferAgent` lies between vLLM's NIXL worker and the NIXL agent. vLLM computes which descriptors to read, and the
agent answers with a `ChunkedRead` in place of NIXL's handle. There each read is attributed to its request. There also
the "done" message to the prefill engine is removed from the read, so that it is sent only after the read was found
valid. `actors.engine.vllm.flow` posts the chunks and checks what was read.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.engine.nixl_agents import tuned
from actors.engine.vllm.connector.chunked_read import Blocks, ChunkedRead, ReadTerms, Side
from actors.engine.vllm.connector.pairs import aligned

LOCAL = "NIXL_INIT_AGENT"
"""NIXL's name for the side that starts a transfer."""


@contextlib.contextmanager
def tuned_agents(delay_us: int) -> Iterator[None]:
    """Tunes the NIXL agents that vLLM creates in this context (`actors.engine.nixl_agents.tuned`)."""
    from vllm.distributed.nixl_utils import NixlWrapper

    with tuned(sys.modules[NixlWrapper.__module__], delay_us):
        yield


@dataclass
class TransferFacts:
    """Totals of one request's reads. `seconds` is the time in which chunks of the longest read were in flight, and
    `held_s` the longest time in which one waited for permits; `level` is the lowest priority level (the largest number)
    of their permits, None without a scheduler. `refused` says why what was read must not be used, and
    `unscheduled` why a part of it was read without a flow scheduler's permit; both are empty otherwise.
    """

    bytes: int = 0
    seconds: float = 0.0
    descriptors: int = 0
    held_s: float = 0.0
    refused: str = ""
    unscheduled: str = ""
    level: int | None = None


class TransferAgent:
    """Delegates to the NIXL agent, and answers with chunked reads between `begin` and `end`. They go to `submit`."""

    def __init__(self, agent: Any, submit: Callable[[ChunkedRead], None] | None = None) -> None:
        self.nixl = agent
        self.submit = submit
        self.facts: dict[str, TransferFacts] = {}
        self._terms: ReadTerms | None = None
        self._notification = b""
        self._reads = 0
        self._open: dict[str, list[ChunkedRead]] = {}
        # Descriptor lists are made in two calls, of which vLLM's handshake thread may make both.
        self._described = threading.local()
        self._blocks: dict[int, Blocks] = {}
        self._extents: dict[int, tuple[int, int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.nixl, name)

    # ------------------------------------------------------------------------------------------ descriptor lists

    def get_xfer_descs(self, descs: Any, *args: Any, **kwargs: Any) -> Any:
        """Describes memory as NIXL's agent does, and remembers addresses and lengths for `prep_xfer_dlist`."""
        described = self.nixl.get_xfer_descs(descs, *args, **kwargs)
        self._described.last = (described, descs)
        return described

    def prep_xfer_dlist(self, agent_name: str, xfer_list: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepares a list as NIXL's agent does, and keeps the addresses and lengths of a local one. Raises TypeError
        for a list that was described elsewhere.
        """
        described, given = getattr(self._described, "last", (None, None))
        if described is not None and described is xfer_list:
            # Each list is prepared once. The memory of a pool's descriptors, megabytes, is not needed after that.
            del self._described.last
            blocks = table(given)
        else:
            blocks = table(xfer_list)
        handle = self.nixl.prep_xfer_dlist(agent_name, xfer_list, *args, **kwargs)
        self._extents[id(handle)] = (len(blocks), int(blocks[:, 1].sum()))
        if agent_name == LOCAL:
            self._blocks[id(handle)] = blocks
        return handle

    def release_dlist_handle(self, handle: Any) -> None:
        """Releases a list as NIXL's agent does."""
        self.nixl.release_dlist_handle(handle)
        self._extents.pop(id(handle), None)
        self._blocks.pop(id(handle), None)

    # ----------------------------------------------------------------------------------------------------- reads

    def begin(self, terms: ReadTerms) -> None:
        """Attributes the reads made until `end` to these terms."""
        self._terms, self._notification, self._reads = terms, b"", 0

    def end(self) -> tuple[int, bytes]:
        """Returns the number of reads made since `begin`, and the "done" message removed from them (empty if there was
        none).
        """
        self._terms = None
        return self._reads, self._notification

    def make_prepped_xfer(
        self,
        operation: str,
        local: Any,
        local_indices: Any,
        remote: Any,
        remote_indices: Any,
        notif_msg: bytes = b"",
        **kwargs: Any,
    ) -> Any:
        """Makes a transfer as NIXL's agent does. Between `begin` and `end` it makes a chunked read, without its
        message, and with its index pairs sorted, so that NIXL joins neighbours.
        """
        if self._terms is None:
            return self.nixl.make_prepped_xfer(
                operation, local, local_indices, remote, remote_indices, notif_msg=notif_msg, **kwargs
            )
        asked = [np.array(indices, dtype=np.int32) for indices in (local_indices, remote_indices)]
        mine, theirs = aligned(*asked)
        blocks = self._blocks[id(local)]
        read = ChunkedRead(
            self.nixl,
            self._terms,
            Side(local, mine, asked[0], blocks, self._extents[id(local)]),
            Side(remote, theirs, asked[1], blocks[:0], self._extents[id(remote)]),
        )
        self._notification = notif_msg or self._notification
        self._reads += 1
        return read

    def transfer(self, handle: Any, *args: Any, **kwargs: Any) -> str:
        """Starts a transfer as NIXL's agent does; a chunked read is given to the thread that reads."""
        if not isinstance(handle, ChunkedRead):
            return str(self.nixl.transfer(handle, *args, **kwargs))
        assert self.submit is not None
        self._open.setdefault(handle.terms.request_id, []).append(handle)
        self.submit(handle)
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        """Returns a transfer's state as NIXL's agent does. A chunked read is under way until it has been checked."""
        return handle.state if isinstance(handle, ChunkedRead) else str(self.nixl.check_xfer_state(handle))

    def get_xfer_telemetry(self, handle: Any) -> Any:
        """Returns a transfer's telemetry as NIXL's agent does, and adds a read's to the request's facts."""
        if not isinstance(handle, ChunkedRead):
            return self.nixl.get_xfer_telemetry(handle)
        facts = self.facts.setdefault(handle.terms.request_id, TransferFacts())
        facts.bytes += handle.read_bytes
        facts.seconds = max(facts.seconds, handle.busy_s)
        facts.descriptors += handle.descriptors
        facts.held_s = max(facts.held_s, handle.permit_wait_s)
        facts.refused = facts.refused or handle.refused
        facts.unscheduled = facts.unscheduled or handle.unscheduled
        facts.level = max(filter(None, (facts.level, handle.level)), default=None)
        return handle.telemetry()

    def release_xfer_handle(self, handle: Any) -> None:
        """Releases a transfer as NIXL's agent does. Raises for a read that may have chunks in flight; its caller keeps
        it.
        """
        if not isinstance(handle, ChunkedRead):
            self.nixl.release_xfer_handle(handle)
            return
        handle.release()
        reads = self._open.get(handle.terms.request_id, [])
        if handle in reads:
            reads.remove(handle)
        if not reads:
            self._open.pop(handle.terms.request_id, None)

    def held_s(self, request_id: str, now_s: float) -> float:
        """Returns the longest time in which nothing of one of the request's open reads was in flight."""
        return max((read.held_s(now_s) for read in self._open.get(request_id, ())), default=0.0)


def table(descriptors: Any) -> Blocks:
    """Returns descriptors as [number, 3]: address, length, device. Raises TypeError where they cannot be seen."""
    blocks = np.asarray(descriptors)
    if blocks.dtype == object or blocks.ndim != 2 or blocks.shape[1] != 3:
        raise TypeError(
            f"descriptors of type {type(descriptors).__name__} hide their lengths: describe them by this agent's "
            "get_xfer_descs, or give (address, length, device) of each"
        )
    return blocks.astype(np.uint64, copy=False)
