"""The worker's control of NIXL while it pulls KV: the request that a transfer belongs to, the data that it moved, and
whether it was still valid.

`TransferAgent` lies between vLLM's NIXL worker and the NIXL agent. vLLM computes which descriptors to read, and the
agent sees every read just before it is posted. There each transfer is attributed to its request. There also the "done"
message to the prefill engine is removed from the read, so that it is sent only after the read was found valid. A flow
scheduler could split and hold reads at the same place.

`GenerationTable` makes it possible to check a read. It is an array in the prefill worker's memory, registered with
NIXL, with one number (a generation) per lease. The worker erases a lease's generation before its blocks may be reused.
A decode worker reads the generation after it has read the blocks. If it is the expected one, the blocks had not been
given back when the read ended. This costs eight bytes per transfer and needs no answer from the other engine, which may
be busy for seconds.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.engine.vllm.connector.pairs import aligned

# Most leases that are checked at once; a request beyond them is served without the check.
TABLE_SLOTS = 65536
_WORD_BYTES = 8

PROBE_TIMEOUT_S = 5.0
"""Seconds after which a lease table that was not read counts as unreadable. ASSUMPTION: connecting to a lender that is
busy takes less; it took 2.2 s on two cores under a load of 16."""

PROBE_WAIT_S = 0.01
"""Most seconds that one step waits for the generations of all reads that ended in it. A generation comes in
microseconds, and waiting for the next step would cost its request a whole step."""

BACK_OFF_S = 10.0
"""Seconds for which a lender whose table could not be read is not asked again; its reads fail at once."""

_WORDS = 4096
_SPIN_S = 0.002


# Longest sleep of NIXL's progress thread if it shares its core with the model (see napping_progress).
CPU_DELAY_US = 1000


@contextlib.contextmanager
def napping_progress(delay_us: int) -> Iterator[None]:
    """Makes NIXL agents created in this context sleep up to `delay_us` between two polls of the network. With 0 they
    spin, as NIXL's Python package has them do.

    The spinning thread takes a whole core. On a CPU engine that is the core that computes. Measured on two cores, a 26
    MB read between two agents took 28 ms (median) with both spinning; at 1,000 us it took 3 ms, with 2 % of a core
    each; at 10,000 us it took 24 ms. NIXL's C++ library has the setting, but its Python package always sets it to 0.
    """
    from vllm.distributed.nixl_utils import NixlWrapper

    module: Any = sys.modules[NixlWrapper.__module__]
    bindings = module.nixlBind

    class Bindings:
        def __getattr__(self, name: str) -> Any:
            return getattr(bindings, name)

        def nixlAgent(self, name: str, config: Any) -> Any:
            config.pthrDelay = delay_us
            return bindings.nixlAgent(name, config)

    module.nixlBind = Bindings()
    try:
        yield
    finally:
        module.nixlBind = bindings


@dataclass
class TransferFacts:
    """Totals of one request's reads. `seconds` is the time of the longest read, as NIXL measured it."""

    bytes: int = 0
    seconds: float = 0.0
    descriptors: int = 0


@dataclass
class Source:
    """One remote worker from which a request reads: its NIXL agent's name and its (pipeline, tensor) rank."""

    agent: str
    rank: tuple[int, int]


class TransferAgent:
    """Delegates to the NIXL agent, and tracks the reads that vLLM posts between `begin` and `end`."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._request: str | None = None
        self._notification = b""
        self._reads = 0
        self._owner: dict[int, str] = {}
        self.facts: dict[str, TransferFacts] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def begin(self, request_id: str) -> None:
        """Attributes the reads made until `end` to `request_id`."""
        self._request, self._notification, self._reads = request_id, b"", 0

    def end(self) -> tuple[int, bytes]:
        """Returns the number of reads made since `begin`, and the "done" message removed from them (empty if there was
        none).
        """
        self._request = None
        return self._reads, self._notification

    def make_prepped_xfer(
        self, operation: str, local: Any, local_ids: Any, remote: Any, remote_ids: Any, notif_msg: bytes = b""
    ) -> Any:
        """Makes a transfer as NIXL's agent does. Between `begin` and `end` its message is removed, it is attributed to
        the request, and its index pairs are sorted, so that NIXL joins neighbours.
        """
        make = self._agent.make_prepped_xfer
        if self._request is None:
            return make(operation, local, local_ids, remote, remote_ids, notif_msg=notif_msg)
        local_ids, remote_ids = aligned(local_ids, remote_ids)
        handle = make(operation, local, local_ids, remote, remote_ids)
        self._notification = notif_msg or self._notification
        self._owner[id(handle)] = self._request
        self._reads += 1
        return handle

    def get_xfer_telemetry(self, handle: Any) -> Any:
        """Returns NIXL's telemetry, and adds it to the request's facts (NIXL counts microseconds, the facts
        seconds).
        """
        telemetry = self._agent.get_xfer_telemetry(handle)
        request_id = self._owner.get(id(handle))
        if request_id is not None and telemetry is not None:
            facts = self.facts.setdefault(request_id, TransferFacts())
            facts.bytes += telemetry.totalBytes
            facts.seconds = max(facts.seconds, telemetry.xferDuration / 1e6)
            facts.descriptors += telemetry.descCount
        return telemetry

    def release_xfer_handle(self, handle: Any) -> None:
        """Releases a handle as NIXL's agent does. After an error the attribution stays, since the caller keeps the
        handle.
        """
        self._agent.release_xfer_handle(handle)
        self._owner.pop(id(handle), None)


class GenerationTable:
    """The generations of the leases that this prefill worker has granted (see the module's docstring)."""

    def __init__(self, agent: Any, backends: list[str]) -> None:
        self._generations = np.zeros(TABLE_SLOTS, dtype=np.uint64)
        self._slot: dict[str, int] = {}
        # The memory stays registered until NIXL's agent is destroyed.
        region = [(self.address, self._generations.nbytes, 0, "")]
        self._registration = agent.register_memory(agent.get_reg_descs(region, "DRAM"), backends=backends)

    @property
    def address(self) -> int:
        """Address of the table in this process's memory."""
        return int(self._generations.ctypes.data)

    def open(self, request_id: str, slot: int, generation: int) -> None:
        """Makes reads of the blocks of `request_id` valid as long as `slot` holds `generation`."""
        self._slot[request_id] = slot
        self._generations[slot] = generation

    def close(self, request_id: str) -> None:
        """Makes later reads of the blocks of `request_id` invalid. Idempotent."""
        slot = self._slot.pop(request_id, None)
        if slot is not None:
            self._generations[slot] = 0


@dataclass(eq=False, slots=True)
class Probe:
    """One read of a generation. `valid` is None while it is under way; then it says whether the lease held."""

    agent: str
    generation: int
    word: int
    handle: Any
    posted_s: float
    valid: bool | None = None


class GenerationProbe:
    """Reads generations from the tables of prefill workers, without waiting for a lender that does not answer.

    A lender may be stopped in the middle of a read, and its answer may then come at any later time. NIXL cannot take a
    read back: its UCX backend cancels the request and frees the handle at once, and its source says that this may not
    be enough. An overdue read therefore keeps its handle and its word of memory until it ends.
    """

    def __init__(self, agent: Any, backends: list[str], timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._agent = agent
        self._timeout_s = timeout_s
        self._words = np.zeros(_WORDS, dtype=np.uint64)
        self._address = int(self._words.ctypes.data)
        self._free = list(range(_WORDS))
        self._overdue: list[Probe] = []
        self._silent_until_s: dict[str, float] = {}
        region = [(self._address, self._words.nbytes, 0, "")]
        self._registration = agent.register_memory(agent.get_reg_descs(region, "DRAM"), backends=backends)

    @property
    def overdue(self) -> int:
        """Number of reads that were given up and have not ended."""
        return len(self._overdue)

    def post(self, source: Source, table_address: int, slot: int, generation: int, now_s: float) -> Probe:
        """Starts to read `slot` of the table. Raises NIXL's errors, and TimeoutError for a lender that has not answered
        lately.
        """
        if self._silent_until_s.get(source.agent, now_s) > now_s:
            raise TimeoutError(f"the lease table of {source.agent} could not be read a moment ago")
        if not self._free:
            raise TimeoutError(f"all {_WORDS} reads of lease tables are overdue")
        word = self._free[-1]
        local = [(self._address + word * _WORD_BYTES, _WORD_BYTES, 0)]
        remote = [(table_address + slot * _WORD_BYTES, _WORD_BYTES, 0)]
        get_descs = self._agent.get_xfer_descs
        handle = self._agent.initialize_xfer(
            "READ", get_descs(local, "DRAM"), get_descs(remote, "DRAM"), source.agent
        )
        self._words[self._free.pop()] = 0
        probe = Probe(source.agent, generation, word, handle, now_s)
        try:
            state = self._agent.transfer(handle)
        except Exception:
            self._end(probe, False)
            raise
        self._settle(probe, state)
        return probe

    def poll(self, probe: Probe, now_s: float) -> bool | None:
        """Returns whether the lease held, or None while that is not known. Raises TimeoutError for a read that takes
        too long; its lender is then left alone for a while. Raises NIXL's errors.
        """
        if probe.valid is None:
            try:
                state = self._agent.check_xfer_state(probe.handle)
            except Exception:
                self._end(probe, False)
                raise
            self._settle(probe, state)
        if probe.valid is None and now_s - probe.posted_s > self._timeout_s:
            self.give_up(probe)
            self._silent_until_s[probe.agent] = now_s + BACK_OFF_S
            raise TimeoutError(f"the lease table of {probe.agent} was not read in {self._timeout_s} s")
        return probe.valid

    def wait(self, probes: list[Probe], limit_s: float = PROBE_WAIT_S) -> None:
        """Waits for `probes` for `limit_s` at most. Errors are left to `poll`."""
        started_s = time.perf_counter()
        while any(probe.valid is None for probe in probes):
            waited_s = time.perf_counter() - started_s
            if waited_s > limit_s:
                return
            if waited_s > _SPIN_S:
                time.sleep(0.0002)
            for probe in probes:
                with contextlib.suppress(Exception):
                    self.poll(probe, probe.posted_s)

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
            self._end(probe, state == "DONE" and int(self._words[probe.word]) == probe.generation)

    def _end(self, probe: Probe, valid: bool) -> None:
        probe.valid = valid
        try:
            self._agent.release_xfer_handle(probe.handle)
        except Exception:
            # NIXL keeps the handle, so the word may still be written: it is not used again.
            return
        self._free.append(probe.word)
