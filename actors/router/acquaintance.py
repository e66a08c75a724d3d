"""The engines that should know one another before a request needs it.

The first read of KV from an engine waits for a handshake of NIXL, 0.3 s each time. An engine that is to serve at once
when it is activated must have made them while it waited: those with engines from which it would read, and, if it would
lend KV itself, those of the engines that read. Nobody knows in which role a warm engine will serve, whatever its role
is now, so each is taken for one that reads and for one that lends.
"""

from collections.abc import Sequence

from actors.wire.channel import Channel
from actors.wire.messages import EngineInfo, Peers


def acquaintances(infos: Sequence[EngineInfo]) -> dict[str, tuple[bytes, ...]]:
    """Returns by the id of each engine that may read KV the `kv_peer` of those from which it may, where one of the two
    is warm. A warm engine may do both. Engines that serve meet one another with their requests.
    """
    # of two that serve neither need be looked at, so a fleet without warm engines costs one look at each
    lenders: dict[str, list[EngineInfo]] = {}
    for info in infos:
        may_lend = info.role != "decode" or info.duty == "warm"
        if info.kv_peer and may_lend and info.state == "ready":
            lenders.setdefault(info.group, []).append(info)
    warm = {group: [info for info in some if info.duty == "warm"] for group, some in lenders.items()}
    found: dict[str, tuple[bytes, ...]] = {}
    for reader in infos:
        may_read = reader.role != "prefill" or reader.duty == "warm"
        if not reader.kv_peer or not may_read or reader.state != "ready":
            continue
        some = (lenders if reader.duty == "warm" else warm).get(reader.group, ())
        peers = tuple([lender.kv_peer for lender in some if lender.id != reader.id])
        if peers:
            found[reader.id] = peers
    return found


class Introductions:
    """The peers that each engine has heard of, by its connection. After a new connection it hears of all again."""

    def __init__(self) -> None:
        self._told: dict[Channel, tuple[bytes, ...]] = {}

    def tell(self, infos: Sequence[EngineInfo], channels: dict[str, Channel]) -> None:
        """Sends each engine those that it should know, if there are others than before."""
        told: dict[Channel, tuple[bytes, ...]] = {}
        for engine_id, peers in acquaintances(infos).items():
            channel = channels[engine_id]
            if set(peers) - set(self._told.get(channel, ())):
                channel.send(Peers(peers))
            told[channel] = peers
        self._told = told
