"""Reads of KV blocks between two processes by NIXL over UCX's TCP: descriptors, CPU time to post, seconds.

A lender process holds a region for each layer, as vLLM's workers do, with a mark at the head of each block. The
borrower, this process, checks the marks of what it has read.
"""

import base64
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

PATIENCE_S = 60.0
_SLEEP_S = 0.0002
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """The KV cache of an engine: regions (one a layer), blocks, and bytes of a block in one region."""

    layers: int
    blocks: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one read. `post_cpu_s` is the CPU time of this thread until the read is posted, sorting included, of
    which `sort_cpu_s` is the sorting; `seconds` is the time until it has ended.
    """

    descriptors: int
    bytes: int
    post_cpu_s: float
    sort_cpu_s: float
    seconds: float


def agent(name: str) -> Any:
    """Returns a NIXL agent as an engine on CPU has it, but without a pool of threads: from a pool, reads of more than
    1,024 descriptors are posted by threads whose CPU time nobody could tell from that of the transfer.
    """
    import nixl._api as nixl

    from actors.engine.nixl_agents import CPU_DELAY_US
    from actors.engine.vllm.connector.transfer import tuned_agents

    with tuned_agents(CPU_DELAY_US):
        return nixl.nixl_agent(name, nixl.nixl_agent_config(num_threads=0, capture_telemetry=True))


def cache(shape: Shape, marked: bool) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Returns the memory of a KV cache, [layers, blocks, words of 8 bytes]; `marked` blocks begin with their index."""
    memory = np.zeros((shape.layers, shape.blocks, shape.block_bytes // _WORD_BYTES), dtype=np.uint64)
    if marked:
        marks = np.arange(1, shape.layers * shape.blocks + 1, dtype=np.uint64)
        memory[:, :, 0] = marks.reshape(shape.layers, shape.blocks)
    return memory


def blocks_of(address: int, shape: Shape) -> list[tuple[int, int, int]]:
    """Returns the descriptors (address, bytes, device) of all blocks, layer by layer."""
    size = shape.block_bytes
    return [(address + n * size, size, 0) for n in range(shape.layers * shape.blocks)]


class Wire:
    """A borrower that is connected to a lender in a process of its own. Use it as a context manager."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        os.environ["UCX_TLS"] = "tcp"
        words = [str(shape.layers), str(shape.blocks), str(shape.block_bytes)]
        self._lender = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfer.wire", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert self._lender.stdout is not None
            line = next((line for line in self._lender.stdout if line.startswith("LENDER ")), None)
            if line is None:
                raise RuntimeError("the lender process ended before it lent anything; see its error output")
            address, metadata = json.loads(line.removeprefix("LENDER "))
            self._memory = cache(shape, marked=False)
            self._agent = agent("borrower")
            region = [(self._memory.ctypes.data, self._memory.nbytes, 0, "")]
            self._registered = self._agent.register_memory(region, "DRAM")
            lender = self._agent.add_remote_agent(base64.b64decode(metadata))
            mine = blocks_of(self._memory.ctypes.data, shape)
            self._local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", mine, "DRAM")
            self._remote = self._agent.prep_xfer_dlist(lender, blocks_of(address, shape), "DRAM")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the lender process."""
        self._lender.kill()
        self._lender.communicate()

    def read(self, local: list[int], remote: list[int], sort: bool) -> Cost:
        """Reads the lender's blocks `remote` into `local` in all layers, with the index pairs sorted or as they are.

        Raises RuntimeError for a read that fails, and where a block has not arrived.
        """
        from actors.engine.vllm.connector.pairs import aligned

        layers = (np.arange(self._shape.layers, dtype=np.int32) * self._shape.blocks)[:, None]
        asked = [(layers + np.asarray(blocks, dtype=np.int32)).ravel() for blocks in (local, remote)]
        self._memory[:, local, 0] = 0
        begun_s, cpu_s = time.perf_counter(), time.thread_time()
        ours, theirs = aligned(*asked) if sort else asked
        sort_cpu_s = time.thread_time() - cpu_s
        handle = self._agent.make_prepped_xfer("READ", self._local, ours, self._remote, theirs)
        state = self._agent.transfer(handle)
        cpu_s = time.thread_time() - cpu_s
        while state == "PROC" and time.perf_counter() - begun_s < PATIENCE_S:
            time.sleep(_SLEEP_S)
            state = self._agent.check_xfer_state(handle)
        seconds = time.perf_counter() - begun_s
        if state != "DONE":
            raise RuntimeError(f"a read of {len(local)} blocks ended as {state} after {seconds:.1f} s")
        telemetry = self._agent.get_xfer_telemetry(handle)
        self._agent.release_xfer_handle(handle)
        if not (self._memory[:, local, 0] == layers + np.asarray(remote) + 1).all():
            raise RuntimeError("a read was done, but blocks have not arrived: the index pairs are wrong")
        return Cost(int(telemetry.descCount), int(telemetry.totalBytes), cpu_s, sort_cpu_s, seconds)


def lend(shape: Shape) -> None:
    """Lends a marked KV cache until standard input ends."""
    memory = cache(shape, marked=True)
    lender = agent("lender")
    registered = lender.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    facts = [memory.ctypes.data, base64.b64encode(lender.get_agent_metadata()).decode()]
    print("LENDER " + json.dumps(facts), flush=True)
    sys.stdin.read()
    del registered


if __name__ == "__main__":
    lend(Shape(*(int(word) for word in sys.argv[1:4])))
