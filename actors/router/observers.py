"""The connected observers (`app.dashboard`), which get what ingresses get and serve no request.

They own no attempts and are not counted among the ingresses, so whether one is there changes no decision. The router
passes the addresses at which they listen on to the ingresses.
"""

from actors.wire.channel import Channel, WireError
from actors.wire.messages import Message, ObserverInfo

MOST_UNREAD_BYTES = 16 * 2**20
"""Bytes that an observer may leave unread before it gets no more reports. ASSUMPTION: some hundred of them."""
MOST_OBSERVERS = 8
"""Most observers at once; one dashboard has one, and two while it is replaced."""


class Observers:
    """All connected observers, each with the addresses that it has told, or None before that."""

    def __init__(self) -> None:
        self._observers: dict[Channel, ObserverInfo | None] = {}

    def __len__(self) -> int:
        return len(self._observers)

    def add(self, channel: Channel) -> bool:
        """Adds the connection of an observer. Returns False, and ends the connection, if there are too many."""
        if len(self._observers) >= MOST_OBSERVERS:
            channel.abort(f"{MOST_OBSERVERS} observers are connected already")
            return False
        self._observers[channel] = None
        return True

    def listens(self, channel: Channel, addresses: tuple[str, ...]) -> None:
        """Notes where an observer listens. Raises ValueError if the connection is no observer's."""
        if channel not in self._observers or channel.peer is None:
            raise WireError(f"{channel.peer_name} is no observer")
        self._observers[channel] = ObserverInfo(channel.peer.id, addresses)

    def lost(self, channel: Channel) -> bool:
        """Removes a closed connection. Returns whether ingresses know its observer."""
        return self._observers.pop(channel, None) is not None

    def infos(self) -> tuple[ObserverInfo, ...]:
        """Returns the observers that ingresses can reach, by their ids."""
        found = [info for info in self._observers.values() if info is not None]
        return tuple(sorted(found, key=lambda info: info.id))

    def broadcast(self, message: Message) -> None:
        """Sends a message to every observer that reads what it gets; the others miss it."""
        for channel in self._observers:
            if channel.unread_bytes() < MOST_UNREAD_BYTES:
                channel.send(message)

    def close(self, reason: str) -> None:
        """Closes the connections of all observers."""
        for channel in list(self._observers):
            channel.close(reason)
