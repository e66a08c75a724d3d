"""Messages between the halves of the KV connector and to the engine: the handshake, a step's metadata, and stats."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    NixlHandshakePayload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from actors.engine.vllm.connector import ENDED, HELLO, LISTENER, OVERDUE, READING, RENEWED, TRANSFERS


@dataclass
class SluicePayload(NixlHandshakePayload):
    """NIXL's handshake payload with facts about a worker: the address of its lease table, where its checksums are
    (`integrity.SumsAt`; None without), the size of a KV block, and the Unix times at which the process began, had its
    imports, had its weights, and had registered its KV cache with NIXL.
    """

    lease_table: int = 0
    sums: tuple[int, int, int, int] | None = None
    kv_block_bytes: int = 0
    born_at_s: float = 0.0
    imported_at_s: float = 0.0
    loaded_at_s: float = 0.0
    registered_at_s: float = 0.0


class SluiceMetadata(NixlConnectorMetadata):
    """The scheduler half's orders for one step: leases to open (request -> slot, generation), blocks that are lent from
    now on (request -> generation, block ids by group), requests whose leases to release, seconds for which leases are
    to last from now on, the remote leases against which reads are checked, the terms of reads for a flow scheduler
    (`chunked_read.FlowTerms`), and the relative layer indices that have fallen since.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opened: dict[str, tuple[int, int]] = {}
        self.lent: dict[str, tuple[int, Any]] = {}
        self.released: list[str] = []
        self.renewed: dict[str, float] = {}
        self.leases: dict[str, dict[str, Any]] = {}
        self.flows: dict[str, dict[str, Any]] = {}
        self.advanced: dict[str, int] = {}


class SluiceStats(NixlKVConnectorStats):
    """NIXL's stats, with Sluice's lists (`actors.engine.vllm.connector`)."""

    OURS = (TRANSFERS, ENDED, RENEWED, HELLO, READING, OVERDUE, LISTENER)

    def reset(self) -> None:
        super().reset()
        self.data.update({key: [] for key in self.OURS})

    def is_empty(self) -> bool:
        return super().is_empty() and not any(self.data[key] for key in self.OURS)
