"""The lease table, by which a worker that has read KV knows that it was still lent when the read ended.

`GenerationTable` is an array in the prefill worker's memory, registered with NIXL, with two numbers per lease. The
first is the lease's generation. The worker erases it before the lease's blocks may be reused. A decode worker reads it
after it has read the blocks: if it is the expected one, the blocks had not been given back when the read ended. This
costs sixteen bytes per transfer and needs no answer from the other engine, which may be busy for seconds. The second
number is the same generation once the checksums of the lease's blocks are known (`integrity`).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

# Most leases that are checked at once; a request beyond them is served without the check.
TABLE_SLOTS = 65536

_ENTRY_BYTES = 16
"""Bytes of one lease's entry: generation, and generation whose checksums are known."""

PROBE_TIMEOUT_S = 5.0
"""Seconds after which a lease table that was not read counts as unreadable. ASSUMPTION: connecting to a lender that is
busy takes less; it took 2.2 s on two cores under a load of 16."""

PATIENCE = 2.0
"""Times that a read took by which its lease table may be read later than `PROBE_TIMEOUT_S`, counted from when something
came from that lender last. Where nobody schedules reads, the entry waits on the same connection behind all bytes that
were asked for before it, as the read itself did, and a full link has ever more of them. ASSUMPTION: two reads of such a
queue do not end further apart than two whole waits in it.
"""

BACK_OFF_S = 10.0
"""Seconds for which a lender whose table could not be read is not asked again; its reads fail at once."""

_ENTRIES = 4096
"""Most reads of lease tables that are under way at once."""


def allowed_after(read_s: float, timeout_s: float = PROBE_TIMEOUT_S) -> float:
    """Returns the seconds in which what checks a read may come, if the read itself took `read_s`."""
    return timeout_s + PATIENCE * read_s


@dataclass(frozen=True, slots=True)
class Source:
    """One remote worker from which a request reads: its NIXL agent's name and its (pipeline, tensor) rank."""

    agent: str
    rank: tuple[int, int]


class GenerationTable:
    """The generations of the leases that this prefill worker has granted (see the module's docstring)."""

    def __init__(self, agent: Any, backends: list[str]) -> None:
        self._entries = np.zeros((TABLE_SLOTS, 2), dtype=np.uint64)
        self._slot: dict[str, int] = {}
        # The memory stays registered until NIXL's agent is destroyed.
        region = [(self.address, self._entries.nbytes, 0, "")]
        self._registration = agent.register_memory(agent.get_reg_descs(region, "DRAM"), backends=backends)

    @property
    def address(self) -> int:
        """Address of the table in this process's memory."""
        return int(self._entries.ctypes.data)

    def open(self, request_id: str, slot: int, generation: int) -> None:
        """Makes reads of the blocks of `request_id` valid as long as `slot` holds `generation`."""
        self._slot[request_id] = slot
        self._entries[slot] = (generation, 0)

    def summed(self, request_id: str, generation: int) -> None:
        """Says that the checksums of the lease's blocks are known. Does nothing for a lease that has ended."""
        slot = self._slot.get(request_id)
        if slot is not None and int(self._entries[slot, 0]) == generation:
            self._entries[slot, 1] = generation

    def close(self, request_id: str) -> None:
        """Makes later reads of the blocks of `request_id` invalid. Idempotent."""
        slot = self._slot.pop(request_id, None)
        if slot is not None:
            self._entries[slot] = 0


@dataclass(eq=False, slots=True)
class Probe:
    """One read of a lease's entry. `valid` is None while it is under way; then it says whether the lease held, and
    `summed` whether its checksums were known.
    """

    agent: str
    generation: int
    place: int
    handle: Any
    posted_s: float
    allowed_s: float
    valid: bool | None = None
    summed: bool = False


class GenerationProbe:
    """Reads generations from the tables of prefill workers, without waiting for a lender that does not answer.

    A lender may be stopped in the middle of a read, and its answer may then come at any later time. NIXL cannot take a
    read back: its UCX backend cancels the request and frees the handle at once, and its source says that this may not
    be enough. An overdue read therefore keeps its handle and its place in memory until it ends.
    """

    def __init__(self, agent: Any, backends: list[str], timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._agent = agent
        self._timeout_s = timeout_s
        self._entries = np.zeros((_ENTRIES, 2), dtype=np.uint64)
        self._address = int(self._entries.ctypes.data)
        self._free = list(range(_ENTRIES))
        self._overdue: list[Probe] = []
        self._silent_until_s: dict[str, float] = {}
        self._heard_s: dict[str, float] = {}
        region = [(self._address, self._entries.nbytes, 0, "")]
        self._registration = agent.register_memory(agent.get_reg_descs(region, "DRAM"), backends=backends)

    @property
    def overdue(self) -> int:
        """Number of reads that were given up and have not ended."""
        return len(self._overdue)

    def post(
        self,
        source: Source,
        table_address: int,
        slot: int,
        generation: int,
        now_s: float,
        read_s: float = 0.0,
    ) -> Probe:
        """Starts to read `slot` of the table, after a read of blocks that took `read_s`. Raises NIXL's errors, and
        TimeoutError for a lender that has not answered lately.
        """
        if self._silent_until_s.get(source.agent, now_s) > now_s:
            raise TimeoutError(f"the lease table of {source.agent} could not be read a moment ago")
        if not self._free:
            raise TimeoutError(f"all {_ENTRIES} reads of lease tables are overdue")
        place = self._free[-1]
        local = [(self._address + place * _ENTRY_BYTES, _ENTRY_BYTES, 0)]
        remote = [(table_address + slot * _ENTRY_BYTES, _ENTRY_BYTES, 0)]
        get_descs = self._agent.get_xfer_descs
        handle = self._agent.initialize_xfer(
            "READ", get_descs(local, "DRAM"), get_descs(remote, "DRAM"), source.agent
        )
        self._entries[self._free.pop()] = 0
        allowed_s = allowed_after(read_s, self._timeout_s)
        probe = Probe(source.agent, generation, place, handle, now_s, allowed_s)
        try:
            state = self._agent.transfer(handle)
        except Exception:
            self._end(probe, False)
            raise
        self._settle(probe, state)
        return probe

    def heard(self, agent: str, now_s: float) -> None:
        """Notes that bytes have come from a lender, so that it is not silent."""
        self._heard_s[agent] = now_s

    def poll(self, probe: Probe, now_s: float) -> bool | None:
        """Returns whether the lease held, or None while that is not known. Raises TimeoutError for a read that takes
        too long after anything came from its lender, which is then left alone for a while. Raises NIXL's errors.
        """
        if probe.valid is None:
            try:
                state = self._agent.check_xfer_state(probe.handle)
            except Exception:
                self._end(probe, False)
                raise
            self._settle(probe, state)
        since_s = max(probe.posted_s, self._heard_s.get(probe.agent, -math.inf))
        if probe.valid is None and now_s - since_s > probe.allowed_s:
            self.give_up(probe)
            self._silent_until_s[probe.agent] = now_s + BACK_OFF_S
            raise TimeoutError(f"the lease table of {probe.agent} was not read in {probe.allowed_s:.1f} s")
        return probe.valid

    def give_up(self, probe: Probe) -> None:
        """Forgets the result of a read that is still under way; its memory is used again when it has ended."""
        if probe.valid is None and probe not in self._overdue:
            self._overdue.append(probe)

    def sweep(self) -> None:
        """Frees what reads that were given up have held, if they have ended."""
        for probe in self._overdue:
            try:
                self._settle(probe, self._agent.check_xfer_state(probe.handle))
            except Exception:
                self._end(probe, False)
        self._overdue = [probe for probe in self._overdue if probe.valid is None]

    def _settle(self, probe: Probe, state: str) -> None:
        if state != "PROC":
            self._silent_until_s.pop(probe.agent, None)
            generation, summed = self._entries[probe.place].tolist()
            probe.summed = state == "DONE" and summed == probe.generation
            self._end(probe, state == "DONE" and generation == probe.generation)

    def _end(self, probe: Probe, valid: bool) -> None:
        probe.valid = valid
        try:
            self._agent.release_xfer_handle(probe.handle)
        except Exception:
            # NIXL keeps the handle, so the place may still be written: it is not used again.
            return
        self._free.append(probe.place)
