"""The question of an engine that starts: who has the weights that it needs?"""

import asyncio
import logging

from actors.wire.channel import Channel, Identity
from actors.wire.link import Find
from actors.wire.messages import FindWeights, Message, WeightsAt
from actors.wire.sockets import connect

log = logging.getLogger(__name__)

FIND_S = 5.0
"""Seconds for the router to be found and to answer; then the start goes on with what is on disk. ASSUMPTION: a router
that is being replaced takes longer than a disk."""


async def find_sources(me: Identity, router: Find, node: str, model: str) -> tuple[tuple[str, ...], ...]:
    """Returns the addresses of each engine that lends the weights of `model`, the nearest to `node` first, as the
    router knows them; none where it does not answer.
    """
    answer: asyncio.Future[WeightsAt] = asyncio.get_running_loop().create_future()

    def took(channel: Channel, message: Message) -> None:
        if isinstance(message, WeightsAt) and not answer.done():
            answer.set_result(message)

    def closed(channel: Channel, reason: str) -> None:
        if not answer.done():
            answer.set_exception(ConnectionError(reason))

    channel: Channel | None = None
    try:
        async with asyncio.timeout(FIND_S):
            addresses = await router()
            channel = await connect(addresses, lambda: Channel(me, took, None, closed), me.tls)
            channel.send(FindWeights(node, model))
            return (await answer).sources
    except Exception as error:
        # Ray's client, which finds the router, raises errors of many kinds
        log.warning("the router was not asked for weights: %r", error)
        return ()
    finally:
        if answer.done() and not answer.cancelled():
            # marks an error as seen
            answer.exception()
        if channel is not None:
            channel.close("the question was answered")
