"""Owners of attempts, and all that ends with an ingress's connection."""

import pytest

from actors.router.ingresses import Ingresses
from actors.wire.channel import Channel, Identity, WireError
from actors.wire.messages import PROTOCOL_VERSION, Hello


def channel(name: str) -> Channel:
    made = Channel(Identity("router", "r"), lambda channel, message: None)
    made.peer = Hello(PROTOCOL_VERSION, "ingress", name)
    return made


async def test_a_lost_ingress_hands_back_what_it_still_owns() -> None:
    ingresses, one = Ingresses(), channel("one")
    ingresses.add(one)
    for attempt_id in ("a", "b"):
        ingresses.own(one, attempt_id)
    assert ingresses.disown("a") and not ingresses.disown("a")
    lost = ingresses.lost(one)
    assert lost is not None and lost.requests == {"b"}
    assert ingresses.lost(one) is None and len(ingresses) == 0


async def test_a_request_that_came_back_over_another_connection_outlives_the_first() -> None:
    ingresses, dead, back = Ingresses(), channel("i"), channel("i")
    ingresses.add(dead)
    ingresses.own(dead, "a")
    # the network between was cut, and nothing has shown yet that the first connection is dead
    ingresses.add(back)
    ingresses.own(back, "a")
    lost = ingresses.lost(dead)
    assert lost is not None and not lost.requests
    assert ingresses.owner("a") is back


async def test_only_an_ingress_may_own() -> None:
    with pytest.raises(WireError, match="is no ingress"):
        Ingresses().own(channel("e"), "a")
