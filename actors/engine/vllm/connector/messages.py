"""Messages between the halves of the KV connector and to the engine: handshake, step metadata, stats."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    NixlHandshakePayload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from actors.engine.vllm.connector import ENDED, HELLO, TRANSFERS


@dataclass
class SluicePayload(NixlHandshakePayload):
    """The handshake with what the engine wants to know of a worker: its lease table, the size of a KV block, and when
    (Unix time) the process began, had its imports, and had its weights and KV cache."""

    lease_table: int = 0
    kv_block_bytes: int = 0
    born_at_s: float = 0.0
    imported_at_s: float = 0.0
    loaded_at_s: float = 0.0


class SluiceMetadata(NixlConnectorMetadata):
    """One step's wishes: leases to open (request -> slot, generation), to release, and those that reads rest on."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: dict[str, tuple[int, int]] = {}
        self.released: list[str] = []
        self.leases: dict[str, dict[str, Any]] = {}


class SluiceStats(NixlKVConnectorStats):
    """NIXL's stats, and per request: [id, ok, bytes, seconds, descriptors, held seconds] of transfers, ended leases."""

    def reset(self) -> None:
        super().reset()
        self.data[TRANSFERS] = []
        self.data[ENDED] = []
        self.data[HELLO] = []

    def is_empty(self) -> bool:
        return super().is_empty() and not any(self.data[key] for key in (TRANSFERS, ENDED, HELLO))
