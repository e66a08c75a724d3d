"""Two real NIXL agents in this process, a lender and a borrower, for tests of reads."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from nixl import _api as nixl

from actors.engine.nixl_agents import CPU_DELAY_US
from actors.engine.vllm.connector.chunked_read import ChunkedRead, FlowTerms, Lease, ReadTerms
from actors.engine.vllm.connector.integrity import SAMPLE, SumsTable
from actors.engine.vllm.connector.lease_table import GenerationProbe, GenerationTable, Source
from actors.engine.vllm.connector.read_check import ReadChecks
from actors.engine.vllm.connector.transfer import LOCAL, TransferAgent, tuned_agents

PATIENCE_S = 60.0
BLOCKS, LAYERS = 64, 8
DESCRIPTORS = BLOCKS * LAYERS

_names = itertools.count()


def agent(name: str) -> Any:
    """A NIXL agent like that of a CPU engine."""
    with tuned_agents(CPU_DELAY_US):
        return nixl.nixl_agent(
            f"{name}-{next(_names)}", nixl.nixl_agent_config(num_threads=1, capture_telemetry=True)
        )


def until(holds: Callable[[], Any]) -> None:
    """Waits until something holds; fails after a patient while."""
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.001)


class Pair:
    """A lender with a lease table and `LAYERS` regions of `BLOCKS` blocks, and a borrower with regions of its own. As
    in vLLM, descriptor `layer * BLOCKS + block` is a block of a layer.
    """

    def __init__(self, block_bytes: int = 4096) -> None:
        self.block_bytes = block_bytes
        self.lender, self.borrower = agent("lender"), TransferAgent(agent("borrower"))
        self.table = GenerationTable(self.lender, ["UCX"])
        self.probe = GenerationProbe(self.borrower.nixl, ["UCX"])
        self.checks = ReadChecks(self.borrower.nixl, ["UCX"], self.probe)
        size = DESCRIPTORS * block_bytes // 8
        self.data = np.random.default_rng(7).integers(0, 1 << 62, size, dtype=np.uint64)
        self.copy = np.zeros(size, dtype=np.uint64)
        self.kept = [self.lender.register_memory(self.region(self.data), "DRAM")]
        self.kept.append(self.borrower.register_memory(self.region(self.copy), "DRAM"))
        self.theirs, self.mine = self.blocks(self.data), self.blocks(self.copy)
        self.sums = SumsTable(self.lender, ["UCX"], self.theirs, share=1)
        self.sampled = SumsTable(self.lender, ["UCX"], self.theirs, share=SAMPLE)
        self.source = Source(self.borrower.add_remote_agent(self.lender.get_agent_metadata()), (0, 0))
        described = self.borrower.get_xfer_descs(self.mine, "DRAM")
        self.local = self.borrower.prep_xfer_dlist(LOCAL, described)
        self.remote = self.borrower.prep_xfer_dlist(self.source.agent, self.theirs, "DRAM")
        self.generation = 1000

    @staticmethod
    def region(array: Any) -> list[tuple[int, int, int, str]]:
        return [(array.ctypes.data, array.nbytes, 0, "")]

    def blocks(self, array: Any) -> Any:
        """The descriptors of an array: address, length, device."""
        rows = [(array.ctypes.data + i * self.block_bytes, self.block_bytes, 0) for i in range(DESCRIPTORS)]
        return np.array(rows, dtype=np.uint64)

    def lend(self, request_id: str, slot: int = 3, sums: SumsTable | None = None) -> Lease:
        """Opens a lease on all blocks, with the checksums of this table of the lender."""
        self.generation += 1
        generation = self.generation
        self.table.open(request_id, slot, generation)
        if sums is not None:
            indices = np.arange(DESCRIPTORS)
            sums.lend(indices, generation, lambda: self.table.summed(request_id, generation))
        at = None if sums is None else sums.at
        return Lease(table=self.table.address, slot=slot, generation=generation, sums=at)

    def read(
        self,
        request_id: str,
        lease: Lease | None = None,
        indices: Any = None,
        notification: bytes = b"",
        **flow: Any,
    ) -> ChunkedRead:
        """A read of these descriptors (all), as vLLM makes it."""
        indices = np.arange(DESCRIPTORS, dtype=np.int32) if indices is None else indices
        flow_terms = FlowTerms(**{"source": "there", "target": "here", **flow})
        self.borrower.begin(
            ReadTerms(request_id=request_id, source=self.source, lease=lease, flow=flow_terms)
        )
        read = self.borrower.make_prepped_xfer(
            "READ", self.local, indices.copy(), self.remote, indices.copy(), notif_msg=notification
        )
        assert self.borrower.end() == (1, notification)
        assert isinstance(read, ChunkedRead)
        return read

    def forget(self) -> None:
        """Erases what was read."""
        self.copy[:] = 0

    def same(self, indices: Any = None) -> bool:
        """Whether these descriptors (all) have been read."""
        words = self.block_bytes // 8
        mine, theirs = (array.reshape(DESCRIPTORS, words) for array in (self.copy, self.data))
        chosen = slice(None) if indices is None else indices
        return bool((mine[chosen] == theirs[chosen]).all())

    def notifications(self) -> list[bytes]:
        """Messages that came to the lender."""
        return [message for messages in self.lender.get_new_notifs().values() for message in messages]
