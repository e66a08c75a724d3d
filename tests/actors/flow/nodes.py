"""Nodes with an agent's desk and a worker each, on a clock of their own; messages take drawn times, in order."""

import dataclasses
import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable

from actors.flow.desk import Desk, Worker
from actors.flow.egress import Egresses
from actors.wire.messages import (
    Beat,
    ChunkDone,
    FlowRefused,
    JoinNode,
    Message,
    Permitted,
    SubmitFlow,
    WithdrawFlow,
)
from policies.flow.arbiter import Arbiter
from policies.flow.base import Flow
from policies.flow.config import ArbiterConfig
from policies.flow.events import Tick
from policies.flow.registry import flow_policy

BEAT_S = 0.005


class Node:
    """One node: its agent's desk, whether the agent runs, and its connections to other agents, by their nodes."""

    def __init__(self, net: "Net", name: str) -> None:
        self.net, self.name = net, name
        self.runs = True
        self.made()

    def made(self) -> None:
        """Makes the agent anew, as after a restart."""
        net = self.net
        self.desk = Desk(Arbiter(flow_policy(net.policy), net.config), set(net.names))
        self.desk.owned.add(self.name)
        egresses = Egresses(
            self.name,
            self.desk.arbiter,
            self.desk.cleared,
            lambda source: net.connect(self.name, source),
            net.silent_s,
            self.desk.totals,
        )
        self.desk.egresses = self.egresses = egresses
        self.worker = self.desk.came("w", self._to_worker)
        self.desk.take(self.worker, JoinNode(self.name), net.now_s)

    def _to_worker(self, message: Message) -> None:
        life = self.desk
        self.net.soon(("down", self.name), lambda: life is self.desk and self.net.told(self, message))

    def from_worker(self, message: Message) -> None:
        """The worker sends a message to its agent."""
        life = self.desk

        def arrives() -> None:
            if life is self.desk:
                self.desk.take(self.worker, message, self.net.now_s)
                self.egresses.settle(self.net.now_s)

        self.net.soon(("up", self.name), arrives)


class Net:
    """All nodes. Chunks take drawn times; `posted` and `bytes` count those on their way, by port."""

    def __init__(
        self,
        names: str,
        seed: int,
        config: ArbiterConfig,
        policy: str = "mfs",
        delay_s: float = 0.002,
        silent_s: float = 1e9,
    ) -> None:
        self.names, self.config, self.policy, self.silent_s = names, config, policy, silent_s
        self.rng = random.Random(seed)
        self.delay_s = delay_s
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._last: dict[object, float] = {}
        self._number = 0
        self._lives: Counter[tuple[str, str]] = Counter()
        # connections between agents, by target and source: the worker at the source's desk, and the number of its life
        self.lines: dict[tuple[str, str], tuple[Worker, int]] = {}
        self.posted: Counter[tuple[str, str]] = Counter()
        self.most: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.most_bytes: Counter[tuple[str, str]] = Counter()
        self.flows: dict[str, Flow] = {}
        self.left: dict[str, int] = {}
        self.in_flight: defaultdict[str, list[int]] = defaultdict(list)
        # nodes that stand still: no chunk from or to them arrives
        self.still: set[str] = set()
        self.nodes = {name: Node(self, name) for name in names}
        self._beat()

    # --------------------------------------------------------------------------------------------------------- time

    def at(self, after_s: float, what: Callable[[], object]) -> None:
        """Lets something happen later."""
        self._number += 1
        heapq.heappush(self._events, (self.now_s + after_s, self._number, what))

    def soon(self, line: object, what: Callable[[], object]) -> None:
        """Lets a message arrive, behind those before it on the same line."""
        at_s = max(self.now_s + self.rng.uniform(0, self.delay_s), self._last.get(line, 0.0))
        self._last[line] = at_s
        self.at(at_s - self.now_s, what)

    def run(self, until_s: float) -> None:
        """Runs to a time, or until all reads are over."""
        while self._events and self._events[0][0] <= until_s and self.left:
            self.now_s, _, what = heapq.heappop(self._events)
            what()

    def drain(self) -> None:
        """Lets what is on its way arrive."""
        end_s = self.now_s + 0.5
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, what = heapq.heappop(self._events)
            what()

    def _beat(self) -> None:
        for node in self.nodes.values():
            if node.runs:
                for worker in list(self._peers(node)):
                    if worker.flows:
                        worker.send(Beat())
                node.egresses.tick(self.now_s, BEAT_S)
                node.desk.apply(Tick(), self.now_s)
        self.at(BEAT_S, self._beat)

    # ------------------------------------------------------------------------------------------------------- agents

    def _peers(self, node: Node) -> list[Worker]:
        return [worker for (_, source), (worker, _) in self.lines.items() if source == node.name]

    def connect(self, target: str, source: str) -> None:
        """Connects the agent of `target` to that of `source`, after a while."""
        self._lives[target, source] += 1
        life = self._lives[target, source]
        asks = self.nodes[target].egresses

        def opened() -> None:
            reader, lender = self.nodes[target], self.nodes[source]
            if not (lender.runs and reader.runs) or self._lives[target, source] != life:
                return
            if reader.egresses is not asks:
                # the reader has begun anew since, and asks for a connection itself
                return

            def back(message: Message) -> None:
                self.soon((source, target, life), lambda: self._arrive(target, source, life, message))

            worker = lender.desk.came(target, back, agent=True)
            self.lines[target, source] = (worker, life)

            def send(message: Message) -> None:
                def arrives() -> None:
                    same = self.lines.get((target, source), (None, 0))[1] == life
                    if same and lender.runs and not isinstance(message, Beat):
                        lender.desk.take(worker, message, self.now_s)

                self.soon((target, source, life), arrives)

            reader.egresses.up(source, send, self.now_s)

        self.at(self.rng.uniform(0, 5 * self.delay_s), opened)

    def _arrive(self, target: str, source: str, life: int, message: Message) -> None:
        if self.lines.get((target, source), (None, 0))[1] == life and self.nodes[target].runs:
            self.nodes[target].egresses.received(source, message, self.now_s)
            self.nodes[target].egresses.settle(self.now_s)

    def cut(self, target: str, source: str) -> None:
        """Ends a connection between two agents; it comes back after a while."""
        found = self.lines.pop((target, source), None)
        if found is not None:
            self.nodes[source].desk.left(found[0], self.now_s)
            self.nodes[target].egresses.down(source)
            self.connect(target, source)

    def restart(self, name: str) -> None:
        """Replaces an agent by a new one, to which its worker submits what is left, as workers do."""
        for target, source in list(self.lines):
            if source == name:
                self.cut(target, source)
            elif target == name:
                worker, _ = self.lines.pop((target, source))
                self.nodes[source].desk.left(worker, self.now_s)
        node = self.nodes[name]
        node.made()
        for flow in [flow for flow in self.flows.values() if flow.target == name]:
            self._submit(flow)

    # ------------------------------------------------------------------------------------------------------ workers

    def read(self, flow: Flow, at_s: float) -> None:
        """Lets the worker of the flow's target read it."""
        self.left[flow.flow_id] = flow.size

        def begins() -> None:
            self.flows[flow.flow_id] = flow
            self._submit(flow)

        self.at(at_s, begins)

    def _submit(self, flow: Flow) -> None:
        left = self.left[flow.flow_id]
        self.nodes[flow.target].from_worker(
            SubmitFlow(dataclasses.replace(flow, size=left), tuple(self.in_flight[flow.flow_id]))
        )

    def abort(self, name: str) -> None:
        """Lets a worker withdraw a read; what is in flight arrives still."""
        flow = self.flows.get(name)
        if flow is None:
            return
        posted = sum(self.in_flight[name])
        self.left[name] = posted
        self.nodes[flow.target].from_worker(WithdrawFlow(name, posted))
        if not posted:
            self._over(name)

    def _over(self, name: str) -> None:
        del self.left[name], self.flows[name]

    def told(self, node: Node, message: Message) -> None:
        """The worker of a node hears of its agent."""
        if isinstance(message, Beat):
            return
        assert isinstance(message, Permitted | FlowRefused)
        flow = self.flows.get(message.flow_id)
        if flow is None:
            return
        free = self.left[flow.flow_id] - sum(self.in_flight[flow.flow_id])
        size = free if isinstance(message, FlowRefused) or message.whole else min(free, message.size)
        if not size:
            return
        # a chunk ends where a block ends, so some are smaller than the permit
        if not getattr(message, "whole", True) and size > 1 and self.rng.random() < 0.2:
            size -= 1
        self._post(node, flow, size)

    def _post(self, node: Node, flow: Flow, size: int) -> None:
        ports = ((flow.source, "out"), (flow.target, "in"))
        self.in_flight[flow.flow_id].append(size)
        for port in ports:
            self.posted[port] += 1
            self.most[port] = max(self.most[port], self.posted[port])
            self.bytes[port] += size
            self.most_bytes[port] = max(self.most_bytes[port], self.bytes[port])
        seconds = size / self.config.port_bytes_per_s * self.rng.uniform(0.5, 1.5)

        def arrived() -> None:
            for port in ports:
                self.posted[port] -= 1
                self.bytes[port] -= size
            name = flow.flow_id
            self.in_flight[name].remove(size)
            self.left[name] -= size
            last = not self.left[name]
            node.from_worker(ChunkDone(name, size, seconds, last))
            if last:
                self._over(name)

        if self.still.isdisjoint((flow.source, flow.target)):
            self.at(seconds, arrived)
