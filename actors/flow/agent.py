"""The agent of a node: it owns the node's ports, and permits the chunks of the reads into it.

One agent runs on each node and listens on a unix socket for the workers there, in a fixed place, so that workers find
an agent that was restarted. It remembers nothing: after a restart each worker submits its reads again. While a worker
has open flows it hears a beat every 5 ms; a worker that hears none goes on without permits (`reader`).

Whatever a worker breaks ends with its own connection: an unknown node, a size that is no number, an id that is open
already, more flows than any queue holds, a wrong secret, another version of the protocol.
"""

import asyncio
import logging
import time
from collections.abc import Set

import msgspec

from actors.flow.config import AgentConfig
from actors.flow.desk import BadMessage, Desk, Worker
from actors.flow.journal import JournalWriter, journal_of
from actors.flow.ordering import Ordering
from actors.wire.channel import Channel, Identity
from actors.wire.link import Find, Link
from actors.wire.messages import Beat, FlowReport, Message, SetFlowPolicy
from actors.wire.sockets import listen, remove_sockets
from policies.flow.base import Port, Side
from policies.flow.events import Ordered, Tick

log = logging.getLogger(__name__)


class FlowAgent:
    """One agent on sockets. `nodes` are the names of all nodes that exist; `find_router` finds the router for reports
    and changes of the policy (None: there is no router).
    """

    def __init__(
        self,
        me: Identity,
        node: str,
        nodes: Set[str],
        config: AgentConfig | None = None,
        find_router: Find | None = None,
    ) -> None:
        self.me, self.node = me, node
        self.config = config or AgentConfig()
        arbiter = self.config.made_arbiter()
        self._journal = JournalWriter(self.config.journal) if self.config.journal else None
        journal = journal_of(arbiter, self._journal) if self._journal is not None else None
        self.desk = Desk(arbiter, nodes, journal)
        self._ordering = Ordering(
            me, self.config.coordinator, self.config.drop_share, arbiter.ports, clock_s, self._ordered
        )
        self.desk.book = self._ordering
        self.addresses: tuple[str, ...] = ()
        self._servers: list[asyncio.Server] = []
        self._workers: dict[Channel, Worker] = {}
        self._beating = False
        self._tick: asyncio.TimerHandle | None = None
        self._reports: asyncio.Task[None] | None = None
        self._broken = 0
        self._router = (
            None
            if find_router is None
            else Link(me, find_router, self._from_router, lambda channel: self._report(), _ignore, "router")
        )

    @property
    def coordinated(self) -> bool:
        """Whether the order between requests comes from a coordinator at present."""
        return self._ordering.coordinated

    async def start(self, addresses: list[str]) -> None:
        """Listens on all `addresses` (`unix:/path`, `tcp:host:port`), and reports to the router if there is one."""
        for address in addresses:
            server, bound = await listen(address, self._new_channel)
            self._servers.append(server)
            self.addresses += (bound,)
        self._ordering.start()
        if self._router is not None:
            self._router.start()
            self._reports = asyncio.create_task(self._report_always(), name="flow reports")

    async def stop(self) -> None:
        """Closes every connection; workers then go on without permits. Idempotent."""
        for server in self._servers:
            server.close()
        for channel in list(self._workers):
            channel.close("the agent stops")
        if self._reports is not None:
            self._reports.cancel()
        if self._tick is not None:
            self._tick.cancel()
        await self._ordering.stop()
        if self._router is not None:
            await self._router.stop()
        if self._journal is not None:
            self._journal.close()
        remove_sockets(self.addresses)
        self._servers = []

    # ----------------------------------------------------------------------------------------------------- workers

    def _new_channel(self) -> Channel:
        return Channel(self.me, self._on_message, self._on_open, self._on_close)

    def _on_open(self, channel: Channel) -> None:
        peer = channel.peer
        assert peer is not None
        if peer.kind != "worker":
            channel.abort(f"an agent serves workers, and {peer.id} is of kind {peer.kind}")
            return
        self._workers[channel] = self.desk.came(peer.id, channel.send)

    def _on_close(self, channel: Channel, reason: str) -> None:
        self._broken += channel.broken
        worker = self._workers.pop(channel, None)
        if worker is None:
            return
        log.info("worker %s left (%s) with %d open flows", worker.name, reason, len(worker.flows))
        self.desk.left(worker, clock_s())
        self._settle()

    def _on_message(self, channel: Channel, message: Message) -> None:
        worker = self._workers.get(channel)
        if worker is None:
            return
        try:
            self.desk.take(worker, message, clock_s())
        except BadMessage as error:
            log.warning("worker %s broke the protocol: %s", worker.name, error)
            channel.broken = True
            channel.abort(f"broke the protocol: {error}")
            return
        self._settle()

    # -------------------------------------------------------------------------------------------------------- time

    def _settle(self) -> None:
        """Sees to it that beats are sent while flows are open, and that the arbiter is woken when it asked for it."""
        loop = asyncio.get_running_loop()
        if not self._beating and len(self.desk):
            self._beating = True
            loop.call_later(self.config.beat_s, self._beat)
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        due_s = self.desk.arbiter.next_tick_s()
        if due_s is not None:
            self._tick = loop.call_later(max(0.0, due_s - clock_s()), self._ticked)

    def _beat(self) -> None:
        self._beating = False
        beat = Beat()
        for channel, worker in self._workers.items():
            if worker.flows:
                channel.send(beat)
        if len(self.desk):
            self._beating = True
            asyncio.get_running_loop().call_later(self.config.beat_s, self._beat)

    def _ticked(self) -> None:
        self._tick = None
        self.desk.apply(Tick(), clock_s())
        self._settle()

    def _ordered(self, ordered: Ordered) -> None:
        self.desk.apply(ordered, clock_s())
        self._settle()

    # ------------------------------------------------------------------------------------------------------ router

    def _from_router(self, channel: Channel, message: Message) -> None:
        if not isinstance(message, SetFlowPolicy):
            raise ValueError(f"an agent does not take {type(message).__name__} from a router")
        try:
            self.desk.set_policy(message.name, msgspec.json.decode(message.params), clock_s())
        except ValueError as error:
            # the router has checked it; a router of another version may know policies that we do not
            log.error("the flow policy stays %s: %s", self.desk.arbiter.policy.name, error)
            return
        log.info("the flow policy is %s now", message.name)
        self._settle()
        self._report()

    async def _report_always(self) -> None:
        while True:
            await asyncio.sleep(self.config.report_s)
            self._report()

    def _report(self) -> None:
        assert self._router is not None
        report = self.report()
        if self._router.send(report):
            del self.desk.ended[: len(report.ended)]

    def report(self) -> FlowReport:
        """Returns the totals and gauges of this agent, and the transfers that ended since the last report."""
        desk = self.desk
        totals = {name: float(count) for name, count in desk.totals.items()}
        totals |= {"held_seconds": desk.held_s, "protocol_errors": float(self._broken)}
        ports = desk.arbiter.ports
        gauges = {"open": float(len(desk)), "workers": float(len(self._workers))}
        for node in sorted({worker.node for worker in self._workers.values() if worker.node is not None}):
            gauges[f"bytes_per_s {node}"] = ports.at(Port(node, Side.INGRESS)).published
        policy = desk.arbiter.policy.name
        return FlowReport(self.node, policy, totals, gauges, tuple(desk.ended))


def clock_s() -> float:
    """Returns the agent's time in seconds, which never goes back."""
    return time.monotonic()


def _ignore(reason: str) -> None:
    """Does nothing: a lost router is found again by its link."""
