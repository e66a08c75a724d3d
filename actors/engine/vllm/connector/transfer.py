"""The worker's view of NIXL while it pulls KV: who a transfer belongs to, what it moved, and whether it was still
valid.

`TransferAgent` stands between vLLM's NIXL worker and the NIXL agent. vLLM computes which descriptors to read; the
agent sees every read just before it is posted. That is where transfers are attributed to requests and where the
"done" message to the prefill engine is taken off the read, so that it is sent only after the read was found
valid. A flow scheduler splits and holds reads at the same place.

`GenerationTable` is what makes a read valid: an array in the prefill worker's memory, registered with NIXL, with one
number (a generation) per lease. The worker wipes a lease's generation before its blocks may be reused. A decode
worker reads it after it has read the blocks: if the generation is the expected one, the blocks had not been given
back when the read ended. This costs eight bytes per transfer and no word from the other engine, which may be busy
for seconds.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

# Leases an engine can have at once; a request beyond that is served without the check.
TABLE_SLOTS = 65536
_WORD_BYTES = 8

# A generation is read by spinning: it arrives in microseconds, and waiting for the next engine step would cost the
# request a whole step. Past this the read counts as failed; all requests of the worker stand still meanwhile.
PROBE_TIMEOUT_S = 5.0
_SPIN_S = 0.002


# How long NIXL's progress thread sleeps at most where it shares its core with the model (see napping_progress).
CPU_DELAY_US = 1000


@contextlib.contextmanager
def napping_progress(delay_us: int) -> Iterator[None]:
    """NIXL agents made inside sleep up to `delay_us` between two looks at the network; 0 spins, as NIXL's Python does.

    The spinning thread takes a whole core. On a CPU engine that is the core that computes: measured on two cores, a
    26 MB read between two agents took 28 ms (median) with both spinning and 3 ms at 1,000 us, at 2 % of a core each;
    at 10,000 us, 24 ms. NIXL's C++ has the setting, its Python sets it to 0 in passing.
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
    """Totals of one request's reads. `seconds` is NIXL's own time, that of the longest read."""

    bytes: int = 0
    seconds: float = 0.0
    descriptors: int = 0


@dataclass
class Source:
    """One remote worker that a request reads from: NIXL agent name and its (pipeline, tensor) rank."""

    agent: str
    rank: tuple[int, int]


class TransferAgent:
    """Delegates to the NIXL agent and watches the reads that vLLM posts between `begin` and `end`."""

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
        """Reads made from now on belong to `request_id`."""
        self._request, self._notification, self._reads = request_id, b"", 0

    def end(self) -> tuple[int, bytes]:
        """How many reads were made since `begin`, and the "done" message taken off them (empty: none)."""
        self._request = None
        return self._reads, self._notification

    def make_prepped_xfer(self, *args: Any, notif_msg: bytes = b"", **kwargs: Any) -> Any:
        """As NIXL's; a read of the current request loses its message and is accounted to the request."""
        if self._request is None:
            return self._agent.make_prepped_xfer(*args, notif_msg=notif_msg, **kwargs)
        handle = self._agent.make_prepped_xfer(*args, **kwargs)
        self._notification = notif_msg or self._notification
        self._owner[id(handle)] = self._request
        self._reads += 1
        return handle

    def get_xfer_telemetry(self, handle: Any) -> Any:
        """As NIXL's; adds to the facts of the request (microseconds there, seconds here)."""
        telemetry = self._agent.get_xfer_telemetry(handle)
        request_id = self._owner.get(id(handle))
        if request_id is not None and telemetry is not None:
            facts = self.facts.setdefault(request_id, TransferFacts())
            facts.bytes += telemetry.totalBytes
            facts.seconds = max(facts.seconds, telemetry.xferDuration / 1e6)
            facts.descriptors += telemetry.descCount
        return telemetry

    def release_xfer_handle(self, handle: Any) -> None:
        """As NIXL's; an error leaves the attribution, since the caller keeps the handle."""
        self._agent.release_xfer_handle(handle)
        self._owner.pop(id(handle), None)


class GenerationTable:
    """Generations of the leases that this prefill worker has given; see the module's text."""

    def __init__(self, agent: Any, backends: list[str]) -> None:
        self._generations = np.zeros(TABLE_SLOTS, dtype=np.uint64)
        self._slot: dict[str, int] = {}
        # Registered for the life of the process: NIXL's agent drops it when it is destroyed.
        region = [(self.address, self._generations.nbytes, 0, "")]
        self._registration = agent.register_memory(agent.get_reg_descs(region, "DRAM"), backends=backends)

    @property
    def address(self) -> int:
        """Where the table begins in this process's memory."""
        return int(self._generations.ctypes.data)

    def open(self, request_id: str, slot: int, generation: int) -> None:
        """The blocks of `request_id` may be read as long as `generation` stands in `slot`."""
        self._slot[request_id] = slot
        self._generations[slot] = generation

    def close(self, request_id: str) -> None:
        """From now on reads of these blocks are invalid. Idempotent."""
        slot = self._slot.pop(request_id, None)
        if slot is not None:
            self._generations[slot] = 0


class GenerationProbe:
    """Reads generations from prefill workers' tables."""

    def __init__(self, agent: Any, backends: list[str], timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._agent = agent
        self._timeout_s = timeout_s
        self._word = np.zeros(1, dtype=np.uint64)
        self._address = int(self._word.ctypes.data)
        region = [(self._address, _WORD_BYTES, 0, "")]
        self._registration = agent.register_memory(agent.get_reg_descs(region, "DRAM"), backends=backends)
        self._local = agent.get_xfer_descs([(self._address, _WORD_BYTES, 0)], "DRAM")

    def holds(self, source: Source, table_address: int, slot: int, generation: int) -> bool:
        """Whether `generation` still stands in `slot` of the table. Raises what NIXL raises, and TimeoutError."""
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
