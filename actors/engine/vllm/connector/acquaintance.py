"""Handshakes with engines from which no KV is read yet. vLLM makes one when a request is about to read."""

from collections.abc import Sequence
from typing import Any

import msgspec


class Peer(msgspec.Struct, frozen=True):
    """How an engine is reached for a handshake: the fields of a KV handle that vLLM needs for it."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    dcp_size: int
    pp_size: int


def packed(peer: Peer) -> bytes:
    """Returns the peer as an engine announces it (`EngineInfo.kv_peer`)."""
    return msgspec.msgpack.encode(peer)


def unpacked(told: bytes) -> Peer:
    """Returns the peer that an engine has announced. Raises msgspec.DecodeError for bytes that are none."""
    return msgspec.msgpack.decode(told, type=Peer)


class MeetPeers:
    """The method that Sluice adds to vLLM's worker class (`worker_extension_cls`)."""

    def meet_kv_peers(self, peers: Sequence[dict[str, Any]]) -> None:
        """Makes the handshakes with these engines in the background, as `SluiceWorker.meet`."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector: Any = get_kv_transfer_group()
        connector.connector_worker.meet(peers)
