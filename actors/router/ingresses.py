"""The connected ingresses and the attempts that each of them owns. Messages about an attempt go to its owner."""

from dataclasses import dataclass, field

from actors.wire.channel import Channel, WireError
from actors.wire.messages import Message
from policies.state.views import RequestId


@dataclass(slots=True)
class Ingress:
    """A connected ingress and the attempts that it owns."""

    channel: Channel
    requests: set[RequestId] = field(default_factory=set)


class Ingresses:
    """All connected ingresses. An attempt has at most one owner; if two connections claim it, the later one owns it,
    since an ingress that reconnects claims its attempts again.
    """

    def __init__(self) -> None:
        self._ingresses: dict[Channel, Ingress] = {}
        self._owner: dict[RequestId, Ingress] = {}
        self.version = 0
        """A counter that grows when an ingress comes or goes."""

    def __len__(self) -> int:
        return len(self._ingresses)

    def add(self, channel: Channel) -> None:
        """Adds the connection of an ingress, which owns no attempts yet."""
        self._ingresses[channel] = Ingress(channel)
        self.version += 1

    def lost(self, channel: Channel) -> Ingress | None:
        """Removes a closed connection. Returns its ingress with the attempts that it still owns, or None if the
        connection is no ingress's.
        """
        lost = self._ingresses.pop(channel, None)
        self.version += lost is not None
        return lost

    def own(self, channel: Channel, attempt_id: RequestId) -> None:
        """Makes the connection's ingress the owner of the attempt. Raises WireError if the connection is no
        ingress's.
        """
        ingress = self._ingresses.get(channel)
        if ingress is None:
            raise WireError(f"request {attempt_id} comes from {channel.peer_name}, which is no ingress")
        self.disown(attempt_id)
        ingress.requests.add(attempt_id)
        self._owner[attempt_id] = ingress

    def disown(self, attempt_id: RequestId) -> bool:
        """Removes the attempt's owner, and returns whether it had one."""
        owner = self._owner.pop(attempt_id, None)
        if owner is not None:
            owner.requests.discard(attempt_id)
        return owner is not None

    def owner(self, attempt_id: RequestId) -> Channel | None:
        """Returns the connection of the attempt's owner, or None if it has no owner."""
        owner = self._owner.get(attempt_id)
        return None if owner is None else owner.channel

    def broadcast(self, message: Message) -> None:
        """Sends a message to every ingress."""
        for channel in self._ingresses:
            channel.send(message)

    def close(self, reason: str) -> None:
        """Closes the connections of all ingresses."""
        for channel in list(self._ingresses):
            channel.close(reason)
