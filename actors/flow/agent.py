"""The agent of a node: it owns the node's ports, and permits the chunks of the reads into it.

One agent runs on each node and listens on a unix socket for the workers there, in a fixed place, so that workers find
an agent that was restarted. It remembers nothing: after a restart each worker submits its reads again. While a worker
has open flows it hears a beat every 5 ms; a worker that hears none goes on without permits (`reader`).

A read from another node needs a permit of that node's agent as well (`egress`), whose addresses are in the directory.
This agent is a worker of that one, and beats back while it holds permits there, so that a stopped agent does not keep a
port for long.

Whatever a worker breaks ends with its own connection: an unknown node, a size that is no number, an id that is open
already, more flows than any queue holds, a wrong secret, another version of the protocol.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Set

import msgspec

from actors.flow.config import AgentConfig
from actors.flow.desk import BadMessage, Desk, Worker
from actors.flow.directory import Directory
from actors.flow.egress import Egresses
from actors.flow.journal import JournalWriter, journal_of
from actors.flow.lookups import Lookups, Owner
from actors.flow.ordering import Ordering
from actors.flow.publisher import Publisher
from actors.wire.channel import Channel, Identity
from actors.wire.link import Find, Link, at
from actors.wire.messages import (
    MOST_NODES,
    Beat,
    FlowReport,
    JoinNode,
    Message,
    SetFlowPolicy,
    SubmitFlow,
)
from actors.wire.sockets import listen, remove_sockets
from policies.flow.base import Port, Side
from policies.flow.events import Ordered, Tick
from policies.flow.registry import parameters

log = logging.getLogger(__name__)


class FlowAgent:
    """One agent on sockets. `nodes` are the names of nodes that exist; a name that is not among them is looked up in
    the `directory`, which also has the agents of other nodes (None: there are none). `find_router` finds the router for
    reports and changes of the policy (None: there is no router), and `find_coordinator` the coordinator of several
    nodes where the configuration names none (None: there is none).
    """

    def __init__(
        self,
        me: Identity,
        node: str,
        nodes: Set[str],
        config: AgentConfig | None = None,
        find_router: Find | None = None,
        directory: Directory | None = None,
        find_coordinator: Find | None = None,
    ) -> None:
        self.me, self.node = me, node
        self._given = frozenset((node, *nodes))
        self._nodes = set(self._given)
        self._directory = directory
        self.config = config or AgentConfig()
        arbiter = self.config.made_arbiter()
        self._journal = JournalWriter(self.config.journal) if self.config.journal else None
        journal = journal_of(arbiter, self._journal) if self._journal is not None else None
        self.desk = Desk(arbiter, self._nodes, journal)
        self.desk.owned.add(node)
        if directory is not None:
            self.desk.egresses = Egresses(
                node, arbiter, self.desk.cleared, self._open_source, self.config.silent_s, self.desk.totals
            )
        self._sources: dict[str, Link] = {}
        self._looks: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._publisher = Publisher(me, directory)
        owner = Owner(self._take, self._refuse, self._receive, self._broke)
        self._lookups = Lookups(self._nodes, directory, self.config.silent_s, owner)
        self._silent_s: dict[Channel, float] = {}
        self._beat_at_s = 0.0
        find = at(self.config.coordinator) if self.config.coordinator else find_coordinator
        self._ordering = Ordering(me, find, self.config.drop_share, arbiter.ports, clock_s, self._ordered)
        self.desk.book = self._ordering
        self.addresses: tuple[str, ...] = ()
        self._servers: list[asyncio.Server] = []
        self._workers: dict[Channel, Worker] = {}
        self._beating = False
        self._tick: asyncio.TimerHandle | None = None
        self._tick_s: float | None = None
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

    @property
    def sources(self) -> tuple[str, ...]:
        """The nodes to whose agents this one keeps a connection, or tries to."""
        return tuple(self._sources)

    @property
    def doubles(self) -> frozenset[str]:
        """The own nodes that another living agent owns, too."""
        return frozenset(self._publisher.doubles)

    async def start(self, addresses: list[str]) -> None:
        """Listens on all `addresses` (`unix:/path`, `tcp:host:port`), and reports to the router if there is one."""
        for address in addresses:
            server, bound = await listen(address, self._new_channel, self.me.tls)
            self._servers.append(server)
            self.addresses += (bound,)
        self._ordering.start()
        self._publisher.publish(self.desk.owned, self.addresses)
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
        self._lookups.stop()
        for timer in self._looks.values():
            timer.cancel()
        for link in self._sources.values():
            await link.stop()
        await self._publisher.stop()
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
        if peer.kind not in ("worker", "agent") or peer.id == self.me.id:
            channel.abort(f"an agent serves workers and other agents, and {peer.id} is of kind {peer.kind}")
            return
        self._workers[channel] = self.desk.came(peer.id, channel.send, peer.kind == "agent")

    def _on_close(self, channel: Channel, reason: str) -> None:
        self._broken += channel.broken
        worker = self._workers.pop(channel, None)
        self._lookups.forget(channel)
        self._silent_s.pop(channel, None)
        if worker is None:
            return
        log.info("worker %s left (%s) with %d open flows", worker.name, reason, len(worker.flows))
        self.desk.left(worker, clock_s())
        self._settle()

    def _on_message(self, channel: Channel, message: Message) -> None:
        worker = self._workers.get(channel)
        if worker is None:
            return
        if worker.agent:
            self._silent_s[channel] = 0.0
            if isinstance(message, Beat):
                return
        self._receive(channel, message)

    def _receive(self, channel: Channel, message: Message) -> None:
        if channel not in self._workers or channel.broken:
            return
        try:
            if self._lookups.keep(channel, message):
                return
        except BadMessage as error:
            self._broke(channel, str(error))
            return
        self._take(channel, message)

    def _take(self, channel: Channel, message: Message) -> None:
        worker = self._workers.get(channel)
        if worker is None or channel.broken:
            return
        try:
            self.desk.take(worker, message, clock_s())
        except BadMessage as error:
            self._broke(channel, str(error))
            return
        if isinstance(message, JoinNode):
            self._publisher.publish(self.desk.owned, self.addresses)
        self._settle()

    def _refuse(self, channel: Channel, message: SubmitFlow, why: str) -> None:
        worker = self._workers.get(channel)
        if worker is None or channel.broken:
            return
        try:
            self.desk.refuse(worker, message, why, clock_s())
        except BadMessage as error:
            self._broke(channel, str(error))
            return
        self._settle()

    def _broke(self, channel: Channel, how: str) -> None:
        if channel in self._workers:
            log.warning("worker %s broke the protocol: %s", self._workers[channel].name, how)
        channel.broken = True
        channel.abort(f"broke the protocol: {how}")

    # ------------------------------------------------------------------------------------------------- other nodes

    def _open_source(self, node: str) -> None:
        """Connects to the agent of a node from which a worker reads, and stays connected."""
        egresses, directory = self.desk.egresses, self._directory
        assert egresses is not None
        assert directory is not None

        async def find() -> tuple[str, ...]:
            addresses = () if node in self.desk.owned else await directory.addresses(node)
            if not addresses:
                raise ConnectionError(f"node {node} has no agent")
            return addresses

        def received(channel: Channel, message: Message) -> None:
            egresses.received(node, message, clock_s())
            self._settle()

        def up(channel: Channel) -> None:
            egresses.up(node, channel.send, clock_s())
            self._settle()

        def down(reason: str) -> None:
            log.info("the agent of %s is lost (%s): reads from there are ordered here alone", node, reason)
            egresses.down(node)

        def ours(then: Callable[..., None]) -> Callable[..., None]:
            # a link ends a turn of the loop after its node was dropped, and may have come up by then
            return lambda *told: then(*told) if self._sources.get(node) is link else None

        def look() -> None:
            if link.channel is None and egresses.dropped(node):
                log.info("node %s is gone: it has no agent, and nothing is read from there", node)
                del self._sources[node], self._looks[node]
                if node not in self._given:
                    self._nodes.discard(node)
                task = asyncio.create_task(link.stop(), name="flow link")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return
            self._looks[node] = loop.call_later(self.config.gone_s, look)

        loop = asyncio.get_running_loop()
        link = self._sources[node] = Link(
            self.me, find, ours(received), ours(up), ours(down), f"agent of {node}"
        )
        link.start()
        self._looks[node] = loop.call_later(self.config.gone_s, look)

    # -------------------------------------------------------------------------------------------------------- time

    def _settle(self) -> None:
        """Sees to it that beats are sent while flows are open, and that the arbiter is woken when it asked for it."""
        loop = asyncio.get_running_loop()
        if self.desk.egresses is not None:
            self.desk.egresses.settle(clock_s())
        if not self._beating and self.desk.open:
            self._beating = True
            self._beat_at_s = clock_s()
            loop.call_later(self.config.beat_s, self._beat)
        due_s = self.desk.arbiter.next_tick_s()
        if due_s == self._tick_s:
            return
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        self._tick_s = due_s
        if due_s is not None:
            self._tick = loop.call_later(max(0.0, due_s - clock_s()), self._ticked)

    def _beat(self) -> None:
        self._beating = False
        now_s, beat = clock_s(), Beat()
        # a beat that comes later shows that this process stood still
        lived_s = min(now_s - self._beat_at_s, self.config.beat_s)
        self._beat_at_s = now_s
        for channel, worker in list(self._workers.items()):
            if worker.flows:
                channel.send(beat)
                if worker.agent:
                    self._hear_nothing(channel, lived_s)
        if self.desk.egresses is not None:
            self.desk.egresses.tick(now_s, lived_s)
            self._settle()
        if self.desk.open and not self._beating:
            self._beating = True
            asyncio.get_running_loop().call_later(self.config.beat_s, self._beat)

    def _hear_nothing(self, channel: Channel, lived_s: float) -> None:
        """Counts the silence of another agent that holds permits here, and ends the connection after a while."""
        self._silent_s[channel] = self._silent_s.get(channel, 0.0) + lived_s
        if self._silent_s[channel] > self.config.lost_s:
            channel.lose(f"the agent was silent for {self.config.lost_s:g} s")

    def _ticked(self) -> None:
        self._tick = self._tick_s = None
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
            try:
                self._report()
            except Exception:
                # an error in here is ours; it must not end the reports of an agent that goes on permitting
                log.exception("no report to the router this time")

    def _report(self) -> None:
        assert self._router is not None
        report = self.report()
        if self._router.send(report):
            del self.desk.ended[: len(report.ended)]

    def report(self) -> FlowReport:
        """Returns this agent's policy, totals and gauges, the transfers that ended since the last report, and what is
        still to move at the ports of its nodes.
        """
        desk = self.desk
        totals = {name: float(count) for name, count in desk.totals.items()}
        held_s = sum(one.held_s for one in desk.ended_at.values())
        totals |= {"held_seconds": held_s, "protocol_errors": float(self._broken)}
        totals |= {"late_chunks": float(desk.arbiter.late_chunks)}
        for level, one in desk.ended_at.items():
            totals[f"ended_level_{level}"], totals[f"held_seconds_level_{level}"] = one.flows, one.held_s
        ports = desk.arbiter.ports
        workers = [worker for worker in self._workers.values() if not worker.agent]
        gauges = {"workers": float(len(workers)), "agents": float(len(self._workers) - len(workers))}
        gauges["open"] = float(sum(len(worker.flows) for worker in workers))
        held = desk.held(clock_s())
        gauges["held"] = float(held.total())
        gauges |= {f"held_level_{level}": float(number) for level, number in held.items()}
        gauges["doubles"] = float(len(self._publisher.doubles))
        for node in sorted({worker.node for worker in workers if worker.node is not None}):
            for side in Side:
                gauges[f"{side}_bytes_per_s {node}"] = ports.at(Port(node, side)).published
        loads = tuple([desk.arbiter.load_of(node) for node in sorted(desk.owned)[:MOST_NODES]])
        policy = desk.arbiter.policy
        params = msgspec.json.encode(parameters(policy))
        return FlowReport(self.node, policy.name, totals, gauges, tuple(desk.ended), params, loads)


def clock_s() -> float:
    """Returns the agent's time in seconds, which never goes back."""
    return time.monotonic()


def _ignore(reason: str) -> None:
    """Does nothing: a lost router is found again by its link."""
