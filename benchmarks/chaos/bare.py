"""An application without Ray: a supervisor forks router, engines and ingresses, and forks a dead one again.

    python -m benchmarks.chaos.bare --config FILE --port PORT --orders FOLDER

Every process obeys orders of faults, as sim engines do (`actors.engine.sim.faults`, under its pid, of which only those
about memory mean anything), and is cut off from others as `cuts` says. A process is back after half a second here, and
after several seconds in Ray, which imports everything anew; far more faults fit into an hour. Ray's own part
(placement, probes, its proxy and controller) is not there to fail. Only sim engines can be served: their process may be
forked from one that has imported all code already. There is a dashboard where the configuration gives it a port.
"""

import argparse
import asyncio
import ctypes
import dataclasses
import gc
import itertools
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import setproctitle

from actors import no_memory
from actors.engine.registry import ENGINES
from actors.engine.report import Reporter
from actors.engine.server import EngineServer
from actors.engine.sim.faults import Faults
from actors.flow.agent import FlowAgent
from actors.flow.coordinator import Coordinator
from actors.flow.directory import FixedDirectory
from actors.options import from_options
from actors.router.clock import clock_s
from actors.router.journal import RouterJournal
from actors.router.network.feed import RouterNetwork
from actors.router.server import RouterServer
from actors.telemetry.environment import decision_traces, traces_of_environment
from actors.wire.channel import Identity
from app.config import AppConfig, parse
from app.groups import EngineGroupConfig
from app.ingress.asgi import IngressApp
from app.ingress.config import IngressConfig
from app.ingress.connections import IngressConnections
from app.ingress.digests import salt_of_application
from app.ingress.http.listener import Listener, ListenerConfig
from app.ingress.metrics import IngressMetrics, counting
from app.ingress.replica import READY_WAIT_S, codec_of
from app.ingress.tenants.gate import Gate
from app.serve import load
from benchmarks.chaos.cuts import Cuts
from benchmarks.live.load import run_fast
from policies.admission.registry import admission_policy
from policies.dispatch.dispatcher import Dispatcher
from policies.fairness.registry import fairness_policy
from policies.routing.registry import decode_policy, prefill_policy

RESTART_S = 0.5
"""Seconds between the end of a process and its next life."""

PROBE_S = 1.0
"""Seconds between two looks at the health of an engine, whose process ends when it is not well."""

NODE = "local"
"""Name of the one node of all engines."""
FLOW_NODES = {"prefill": "lenders", "decode": "readers"}
"""Names of the two nodes of engines by their role where reads are scheduled: a read needs permits of both agents."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Part = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Slot:
    """One process of the application: its title, what it runs, and its present pid."""

    title: str
    run: Part
    pid: int | None = None
    ended_s: float = 0.0


class Application:
    """The parts of one application, as coroutines that serve until the process ends."""

    def __init__(self, config: AppConfig) -> None:
        assert config.wire.socket_dir is not None
        self._config = config
        self._directory = Path(config.wire.socket_dir)
        self._router = self._directory / "router.json"
        self._agents = {node: (f"unix:{self._directory}/flow-{node}.sock",) for node in FLOW_NODES.values()}
        self._coordinator = f"unix:{self._directory}/flow-coordinator.sock"
        self._generations = itertools.count(1)
        self._generation = 0

    def slots(self) -> list[Slot]:
        """Returns all processes of the application."""
        found = [Slot("Router", self._run_router)]
        if self._config.flow.enabled:
            found.append(Slot("FlowCoordinatorActor", self._run_coordinator))
            found += [Slot("FlowAgentActor", self._run_agent(node)) for node in self._agents]
        for group in self._config.engines:
            title = "".join(part.capitalize() for part in group.name.split("-")) + "Engine"
            found += [Slot(title, self._engine(group)) for _ in range(group.replicas)]
        found += [Slot("Ingress", self._run_ingress) for _ in range(self._config.ingress.replicas or 1)]
        if self._config.dashboard.port:
            found.append(Slot("Dashboard", self._run_dashboard))
        return found

    def next_generation(self) -> None:
        """Counts a further life of the router. Called in the supervisor, before it forks the router."""
        self._generation = next(self._generations)

    def _address(self, name: str) -> str:
        return f"unix:{self._directory}/{name}-{uuid.uuid4().hex[:8]}.sock"

    async def _find(self) -> tuple[str, ...]:
        addresses: list[str] = json.loads(self._router.read_text())
        return tuple(addresses)

    async def _run_router(self) -> None:
        router = self._config.router
        dispatcher = Dispatcher(
            router.dispatch_config(),
            prefill_policy(router.prefill.name, router.prefill.params),
            decode_policy(router.decode.name, router.decode.params),
            admission_policy(router.admission.name, router.admission.params),
            fairness_policy(router.fairness.name, router.fairness.params),
        )
        me = Identity("router", f"router-{uuid.uuid4().hex[:8]}")
        journal = RouterJournal(router.journal_config(), dispatcher, "0") if router.journal else None
        server = RouterServer(
            me,
            dispatcher,
            router.engine_grace_s,
            network=RouterNetwork(router.network_config()),
            journal=journal,
            generation=self._generation,
            traces=decision_traces(me.id, clock_s),
        )
        address = self._address("router")
        await server.start([address])
        half = self._router.with_suffix(".part")
        half.write_text(json.dumps([address]))
        half.replace(self._router)
        await asyncio.Event().wait()

    async def _run_coordinator(self) -> None:
        """Serves the coordinator of both agents, at the same address in each of its lives."""
        config = self._config.flow.agent_config()
        me = Identity("coordinator", f"coordinator-{uuid.uuid4().hex[:8]}")
        arbiter = config.arbiter_config()
        coordinator = Coordinator(me, config.drop_share, arbiter.port_bytes_per_s, arbiter.most_flows)
        await coordinator.start([self._coordinator])
        await asyncio.Event().wait()

    def _run_agent(self, node: str) -> Part:
        """Returns what serves a node's flow agent at the same address in each of its lives."""

        async def run() -> None:
            me = Identity("agent", f"agent-{uuid.uuid4().hex[:8]}")
            config = dataclasses.replace(self._config.flow.agent_config(), coordinator=self._coordinator)
            directory = FixedDirectory(self._agents)
            agent = FlowAgent(me, node, frozenset(self._agents), config, self._find, directory)
            await agent.start(list(self._agents[node]))
            await asyncio.Event().wait()

        return run

    def _engine(self, group: EngineGroupConfig) -> Part:
        async def run() -> None:
            engine_id = f"{group.name}-{uuid.uuid4().hex[:8]}"
            flow = {}
            if self._config.flow.enabled:
                node = FLOW_NODES[group.role]
                flow = {"flow_agent": self._agents[node][0], "flow_node": node}
            config = group.engine.engine_config(engine_id, "sim", "sim", **flow)
            me = Identity("engine", engine_id)
            server = EngineServer(
                ENGINES[group.kind].make(config),
                me,
                [self._address(engine_id)],
                node=NODE,
                replica=engine_id,
            )
            await server.start()
            reporter = Reporter(me, server, self._find)
            reporter.start()
            while True:
                await asyncio.sleep(PROBE_S)
                await server.check_health()

        return run

    async def _run_ingress(self) -> None:
        group = self._config.ingress
        replica_id = f"ingress-{uuid.uuid4().hex[:8]}"
        options: dict[str, Any] = {
            "served_names": ("sim",),
            "expects_prefill": True,
            "fallback_admission": self._config.router.admission.name,
            **group.options,
            "replica_id": replica_id,
        }
        metrics = IngressMetrics("sim")
        config = from_options(IngressConfig, options, "ingress.options")
        salt = salt_of_application(group.port, None)
        connections = IngressConnections(config, Identity("ingress", replica_id), self._find, metrics, salt)
        traces = traces_of_environment(counting(metrics.traces), "sluice-ingress", replica_id)
        codec = codec_of(self._config.model)
        gate = Gate(config, metrics, connections.ingresses) if config.key_file else None
        app = IngressApp(config, connections, codec, metrics, {"version": "0"}, traces=traces, gate=gate)
        if gate is not None:
            gate.start()
        await connections.start()
        await connections.wait_ready(READY_WAIT_S)
        await Listener(app, ListenerConfig(host=group.host, port=group.port, reuse_port=True)).start()
        await asyncio.Event().wait()

    async def _run_dashboard(self) -> None:
        # few applications have one, and its libraries are not theirs to load
        from app.dashboard.replica import Dashboard, Target
        from app.dashboard.store import RunsConfig

        config, ingress = self._config, self._config.ingress
        board = config.dashboard.resolved(ingress)
        runs = from_options(RunsConfig, board.experiments, "dashboard.experiments")
        options, target = ingress.options, Target(ingress.port, ingress.url, ingress.tls_cert)
        slo, keys = options.get("class_slo", {}), tuple(options.get("admin_keys", ()))
        dashboard = Dashboard(
            board, runs, config.model.served_name, slo, target, keys, config.wire, self._find
        )
        await dashboard.start()
        await asyncio.Event().wait()


def main(argv: list[str] | None = None) -> int:
    """Serves until SIGINT or SIGTERM, and returns 0."""
    parser = argparse.ArgumentParser(prog="benchmarks.chaos.bare", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--http-port", type=int, help="ignored: there is no proxy")
    parser.add_argument("--orders", type=Path, required=True, help="folder of orders to fail")
    args = parser.parse_args(argv)
    config = parse(load(args.config, args.port, args.http_port)["applications"][0]["args"])
    assert config.wire.socket_dir is not None
    os.makedirs(config.wire.socket_dir, 0o700, exist_ok=True)
    application = Application(config)
    slots = application.slots()
    ends: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: ends.append(received))
    # Loads the policies' compiled code, which no later life of the router then waits for.
    prefill_policy(config.router.prefill.name, config.router.prefill.params)
    decode_policy(config.router.decode.name, config.router.decode.params)
    gc.freeze()
    while not ends:
        for slot in slots:
            if slot.pid is None and time.monotonic() >= slot.ended_s + RESTART_S:
                if slot.title == "Router":
                    application.next_generation()
                slot.pid = _fork(slot, args.orders)
        _collect(slots)
        time.sleep(0.05)
    for slot in slots:
        if slot.pid is not None:
            os.kill(slot.pid, signal.SIGKILL)
            os.waitpid(slot.pid, 0)
    return 0


def _fork(slot: Slot, orders: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        setproctitle.setproctitle(f"ray::ServeReplica:sluice:{slot.title}")
        logging.basicConfig(
            stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {slot.title} %(process)d %(message)s"
        )
        run_fast(_serve(slot.run, orders))
    except BaseException:
        logging.getLogger(__name__).exception("%s ends", slot.title)
    finally:
        os._exit(1)


async def _serve(part: Part, orders: Path) -> None:
    no_memory.watch()
    Cuts(orders).guard()
    Faults(str(orders), str(os.getpid()), lambda: None).start()
    await part()


def _collect(slots: list[Slot]) -> None:
    """Notes which processes have ended."""
    for slot in slots:
        if slot.pid is not None and os.waitpid(slot.pid, os.WNOHANG)[0]:
            slot.pid, slot.ended_s = None, time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
