"""The flow agent's word on the flows that have ended. An agent reports to a router once a second, and here takes the
benchmark for one.
"""

import asyncio
from collections.abc import Sequence

from actors.wire.channel import Channel, Identity
from actors.wire.messages import FlowRecord, FlowReport, Message
from actors.wire.sockets import listen, remove_sockets
from benchmarks.mfs.engines import SECRET

PATIENCE_S = 30.0
"""Longest wait for a report. An agent reports once a second; one that does not within this time has gone."""


class Reports:
    """The reports of the agent that looks for its router at `address`; "" where there is no agent, and no flow."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._ended: list[FlowRecord] = []
        self._lost = self._lost_before = 0
        self._came = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens for the agent."""
        if self._address:
            me = Identity("router", "benchmark", SECRET.encode())
            self._server, _ = await listen(self._address, lambda: Channel(me, self._received))

    def stop(self) -> None:
        """Closes the socket."""
        if self._server is not None:
            self._server.close()
            remove_sockets((self._address,))

    async def taken(self) -> tuple[Sequence[FlowRecord], int]:
        """Returns the flows that have ended since the last call, and how many others were lost with their worker's
        connection. The caller has seen the end of all of them. Raises ConnectionError if no report comes.
        """
        if self._server is None:
            return (), 0
        # the first report from now on may have been made before the last flow ended
        for _ in range(2):
            self._came.clear()
            try:
                await asyncio.wait_for(self._came.wait(), PATIENCE_S)
            except TimeoutError:
                raise ConnectionError(f"no report of the flow agent in {PATIENCE_S:g} s") from None
        ended, self._ended = self._ended, []
        lost, self._lost_before = self._lost - self._lost_before, self._lost
        return ended, lost

    def _received(self, channel: Channel, message: Message) -> None:
        if isinstance(message, FlowReport):
            self._ended += message.ended
            self._lost = round(message.totals.get("lost", 0.0))
            self._came.set()
