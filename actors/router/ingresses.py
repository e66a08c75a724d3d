"""The connected ingresses and the requests that each owns: a request's messages go to its owner, and end with it."""

from dataclasses import dataclass, field

from actors.wire.channel import Channel
from actors.wire.messages import Message
from policies.state.views import RequestId


@dataclass(slots=True)
class Ingress:
    """A connected ingress and the requests that it owns."""

    channel: Channel
    requests: set[RequestId] = field(default_factory=set)


class Ingresses:
    """Every request has at most one owner; of two that claim it the later one (it has reconnected)."""

    def __init__(self) -> None:
        self._ingresses: dict[Channel, Ingress] = {}
        self._owner: dict[RequestId, Ingress] = {}

    def __len__(self) -> int:
        return len(self._ingresses)

    def add(self, channel: Channel) -> None:
        """A new connection."""
        self._ingresses[channel] = Ingress(channel)

    def lost(self, channel: Channel) -> Ingress | None:
        """A connection has ended; the ingress with the requests that are still its own, None if it was none."""
        return self._ingresses.pop(channel, None)

    def own(self, channel: Channel, attempt_id: RequestId) -> None:
        """The request is this connection's from now on. Raises ValueError when it is no ingress's."""
        ingress = self._ingresses.get(channel)
        if ingress is None:
            raise ValueError(f"request {attempt_id} comes from {channel.peer_name}, which is no ingress")
        self.disown(attempt_id)
        ingress.requests.add(attempt_id)
        self._owner[attempt_id] = ingress

    def disown(self, attempt_id: RequestId) -> bool:
        """The request is over, or another's; False where it has no owner."""
        owner = self._owner.pop(attempt_id, None)
        if owner is not None:
            owner.requests.discard(attempt_id)
        return owner is not None

    def owner(self, attempt_id: RequestId) -> Channel | None:
        """Where to send what concerns the request."""
        owner = self._owner.get(attempt_id)
        return None if owner is None else owner.channel

    def broadcast(self, message: Message) -> None:
        """To all."""
        for channel in self._ingresses:
            channel.send(message)

    def close(self, reason: str) -> None:
        """Closes all connections."""
        for channel in list(self._ingresses):
            channel.close(reason)
