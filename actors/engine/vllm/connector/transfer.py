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

# Most leases that are checked at once; a request beyond them is served without the check.
TABLE_SLOTS = 65536
_WORD_BYTES = 8

# A generation is read by spinning: it arrives in microseconds, and waiting for the next engine step would cost the
# request a whole step. After this time the read counts as failed; all requests of the worker wait for as long.
PROBE_TIMEOUT_S = 5.0
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

    def make_prepped_xfer(self, *args: Any, notif_msg: bytes = b"", **kwargs: Any) -> Any:
        """Makes a transfer as NIXL's agent does. Between `begin` and `end` its message is removed, and it is attributed
        to the request.
        """
        if self._request is None:
            return self._agent.make_prepped_xfer(*args, notif_msg=notif_msg, **kwargs)
        handle = self._agent.make_prepped_xfer(*args, **kwargs)
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


class GenerationProbe:
    """Reads generations from the tables of prefill workers."""

    def __init__(self, agent: Any, backends: list[str], timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._agent = agent
        self._timeout_s = timeout_s
        self._word = np.zeros(1, dtype=np.uint64)
        self._address = int(self._word.ctypes.data)
        region = [(self._address, _WORD_BYTES, 0, "")]
        self._registration = agent.register_memory(agent.get_reg_descs(region, "DRAM"), backends=backends)
        self._local = agent.get_xfer_descs([(self._address, _WORD_BYTES, 0)], "DRAM")

    def holds(self, source: Source, table_address: int, slot: int, generation: int) -> bool:
        """Returns whether `slot` of the table still holds `generation`. Raises NIXL's errors, and TimeoutError."""
        remote = self._agent.get_xfer_descs([(table_address + slot * _WORD_BYTES, _WORD_BYTES, 0)], "DRAM")
        self._word[0] = 0
        handle = self._agent.initialize_xfer("READ", self._local, remote, source.agent)
        try:
            state = self._agent.transfer(handle)
            started_s = time.perf_counter()
            while state == "PROC":
                waited_s = time.perf_counter() - started_s
                if waited_s > self._timeout_s:
                    raise TimeoutError(
                        f"the lease table of {source.agent} was not read in {self._timeout_s} s"
                    )
                if waited_s > _SPIN_S:
                    time.sleep(0.0002)
                state = self._agent.check_xfer_state(handle)
        finally:
            self._agent.release_xfer_handle(handle)
        return state == "DONE" and int(self._word[0]) == generation
