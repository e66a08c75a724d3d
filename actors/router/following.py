"""The router's part of the way of an attempt whose times somebody wants: when it heard of it, and when it decided.

An attempt is followed if its Submit has `trace`. What is noted of it goes to the log of decisions at the attempt's end,
when the ingress tells the moments of the other processes (`actors.telemetry.times`).
"""

from collections.abc import Sequence

from actors.router.clock import clock_s, monotonic_s, time_of
from actors.telemetry.times import CLOCK, Hop, Stamps, hops, now_s
from actors.wire.channel import Channel
from actors.wire.messages import TimesTold
from policies.dispatch.dispatcher import Action, RouteDecode, RoutePrefill


class Following:
    """The followed attempts, each with the moments at this router, which is called `name`. It is false where there are
    none, so that others cost one look at it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._at_s: dict[str, dict[str, float]] = {}
        # the connections of their ingresses
        self._owners: dict[str, Channel] = {}

    def __bool__(self) -> bool:
        return bool(self._at_s)

    def begin(self, attempt_id: str, owner: Channel) -> None:
        """Follows an attempt whose Submit has just come over the connection `owner`."""
        self._at_s[attempt_id] = {"received": now_s()}
        self._owners[attempt_id] = owner

    def reported(self, attempt_id: str) -> None:
        """Notes that the prefill of an attempt has been reported, which then enters the pool."""
        followed = self._at_s.get(attempt_id)
        if followed is not None:
            followed["reported"] = now_s()

    def decided(self, at_s: float, took_s: float, actions: Sequence[Action]) -> None:
        """Notes the decisions that an event at `at_s` of the router's clock led to, after `took_s`."""
        for action in actions:
            followed = self._at_s.get(action.attempt_id)
            if followed is None or not isinstance(action, RoutePrefill | RouteDecode):
                continue
            begun, decided = "begun", "decided"
            if isinstance(action, RouteDecode):
                begun, decided = "decode_begun", "decode_decided"
            followed[begun] = monotonic_s(at_s)
            followed[decided] = followed[begun] + took_s

    def ended(self, message: TimesTold) -> tuple[float, list[Hop]]:
        """Forgets an attempt that ends now. Returns (when its request arrived, by the router's clock; its way)."""
        followed = self._at_s.get(message.attempt_id)
        self.forget(message.attempt_id)
        own = () if followed is None else (Stamps(self._name, "router", CLOCK, followed),)
        way = hops((*message.stamps, *own))
        heard_s = next((hop.until_s for hop in way if hop.process == self._name), None)
        if followed is None or heard_s is None:
            return clock_s() - max((hop.until_s for hop in way), default=0.0), way
        return time_of(followed["received"]) - heard_s, way

    def forget(self, attempt_id: str) -> None:
        """Forgets an attempt that is over."""
        self._at_s.pop(attempt_id, None)
        self._owners.pop(attempt_id, None)

    def lost(self, owner: Channel) -> None:
        """Forgets the attempts of an ingress whose connection has ended. It tells nothing more of those that were
        rejected either.
        """
        for attempt_id in [one for one, of in self._owners.items() if of is owner]:
            self.forget(attempt_id)
