"""The application on hosts of `network` without Ray: the parts that Ray Serve would start, each in its host's network.

Head: router, ingress with its listener, an engine of each role. Worker: an engine of each role. Each host's parts run
in a thread of the test's process with a uvloop of its own, over TCP with the shared secret. It starts in seconds, so a
fault can be tried without the minutes of a cluster (`cluster` has Ray's form, with processes and files of each host).
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from actors.engine.registry import ENGINES, engine_config
from actors.engine.report import Reporter
from actors.engine.server import EngineServer
from actors.router.server import RouterServer
from actors.wire.channel import Identity
from app.ingress.asgi import IngressApp
from app.ingress.config import IngressConfig
from app.ingress.connections import IngressConnections
from app.ingress.digests import salt_of_application
from app.ingress.http.listener import Listener, ListenerConfig
from app.ingress.metrics import IngressMetrics
from app.ingress.tokenizer import WordCodec
from benchmarks.hosts.network import Host, Lan, lan
from policies.dispatch.dispatcher import DispatchConfig, Dispatcher
from policies.routing.simple.round_robin import RoundRobin
from tests.live.serving import PATIENCE_S, App

HEAD, WORKER, CLIENT = "10.78.0.1", "10.78.0.2", "10.78.0.9"
PORT = 8000
SECRET = b"a secret of the hosts' tests"
LEASE_S, LEASE_MARGIN_S = 8.0, 2.0


class Place:
    """An event loop in a thread whose network is a host's."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self.host.network():
            self._loop.run_forever()

    def call(self, what: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine in the loop and returns its result."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(PATIENCE_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)


@dataclass
class RaylessApp(App):
    """The application without Ray; an engine names its host as its node."""

    def ready_engines(self) -> set[str]:
        """Returns the ids of the engines that are ready."""
        return {e["id"] for e in self.status()["engines"] if e["state"] == "ready"}

    def engines_on(self, host: Host) -> set[str]:
        """Returns the ids of the ready engines on a host."""
        return {e["id"] for e in self.status()["engines"] if e["node"] == host.name and e["state"] == "ready"}


@dataclass
class Rayless:
    """The hosts and what runs on them; `away` is the one that is not the head, and `router_on` has the router."""

    lan: Lan
    router_on: str
    stops: list[tuple[Place, Coroutine[Any, Any, Any]]] = field(default_factory=list)
    router: RouterServer | None = None

    @property
    def head(self) -> Host:
        return self.lan.hosts["head"]

    @property
    def away(self) -> Host:
        return self.lan.hosts["worker"]

    async def find(self) -> tuple[str, ...]:
        assert self.router is not None
        return self.router.addresses

    async def start_router(self, address: str) -> None:
        policy = RoundRobin()
        dispatcher = Dispatcher(DispatchConfig(lease_margin_s=LEASE_MARGIN_S), policy, policy)
        self.router = RouterServer(Identity("router", "router-1", SECRET), dispatcher, engine_grace_s=2.0)
        await self.router.start([f"tcp:{address}:0"])

    async def start_engine(self, host: Host, role: str) -> Coroutine[Any, Any, Any]:
        name = f"{role}-{host.name}"
        timing = {"prefill_base_s": 0.05, "decode_base_s": 0.02}
        facts = {"engine_id": name, "role": role}
        config = engine_config("sim", facts, {"slots": 64, "timing": timing, "lease_s": LEASE_S})
        me = Identity("engine", name, SECRET)
        server = EngineServer(ENGINES["sim"].make(config), me, [f"tcp:{host.address}:0"], node=host.name)
        await server.start()
        reporter = Reporter(me, server, self.find)
        reporter.start()

        async def stop() -> None:
            await reporter.stop()
            await server.stop()

        return stop()

    async def start_ingress(self, address: str) -> Coroutine[Any, Any, Any]:
        config = IngressConfig(served_names=("sim",), replica_id="ingress-1")
        metrics = IngressMetrics("sim")
        me = Identity("ingress", "ingress-1", SECRET)
        connections = IngressConnections(config, me, self.find, metrics, salt_of_application(PORT, SECRET))
        app = IngressApp(config, connections, WordCodec(), metrics, {"version": "0"})
        listener = Listener(app, ListenerConfig(host=address, port=PORT))
        await connections.start()
        await listener.start()

        async def stop() -> None:
            await listener.stop()
            await connections.stop()

        return stop()


@contextlib.contextmanager
def rayless(router_on: str = "head") -> Iterator[tuple[Rayless, RaylessApp]]:
    """Runs the application on two hosts for the time of a block, and yields when it is ready."""
    with lan({"head": HEAD, "worker": WORKER, "client": CLIENT}) as made:
        running = Rayless(made, router_on)
        places = {name: Place(made.hosts[name]) for name in ("head", "worker")}
        at = places[router_on]
        at.call(running.start_router(str(at.host.address)))
        assert running.router is not None
        stops = [(at, running.router.stop())]
        for place in places.values():
            for role in ("prefill", "decode"):
                stops.append((place, place.call(running.start_engine(place.host, role))))
        stops.append((places["head"], places["head"].call(running.start_ingress(HEAD))))
        with made.hosts["client"].network():
            app = RaylessApp(None, f"http://{HEAD}:{PORT}", "", Path(), "sluice")  # type: ignore[arg-type]
            try:
                app.wait(lambda s: s["ready"] and len(app.ready_engines()) == 4, "four engines")
                yield running, app
            finally:
                app.http.close()
        for place, stop in reversed(stops):
            place.call(stop)
        for place in places.values():
            place.stop()
