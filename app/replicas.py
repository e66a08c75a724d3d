"""The classes that Ray Serve runs: thin shells that start a component, connect it, and end it.

Ray places, supervises and restarts these; requests, decisions and tokens never pass through a Serve handle (the one
handle call is `Router.addresses`, made at each connect). Each is a plain class, of which `app.graph` makes a
deployment.
"""

import importlib.metadata
import ipaddress
import logging
import os
import socket
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_list, _internal_kv_put

from actors import garbage
from actors.engine.cores import divide_cores, usable_cores
from actors.engine.registry import ENGINES
from actors.wire.channel import Identity
from app.config import EngineConfig, ModelConfig, RouterConfig, WireConfig
from app.drain import DrainPoint, socket_directory
from app.flow_agent import AgentKeeper, FlowShare

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from actors.engine.protocol import Engine

log = logging.getLogger("ray.serve")

DRAIN_S = 15.0
"""Seconds that a replica gives its running requests before it ends."""


class CoreShare(NamedTuple):
    """An engine's share of its node's CPU cores: `engines` engines divide them, and this is share number `at`."""

    at: int
    engines: int


def listen_addresses(wire: WireConfig, name: str) -> list[str]:
    """Returns the addresses on which a component of this process listens.

    They are a unix socket and, if `wire` has an interface, TCP there. Raises RuntimeError for TCP without a secret,
    because internal sockets between nodes are always authenticated.
    """
    directory = socket_directory(wire.socket_dir)
    addresses = [f"unix:{os.path.join(directory, f'{name}-{uuid.uuid4().hex[:8]}.sock')}"]
    if wire.interface is not None:
        if wire.secret() is None:
            raise RuntimeError(
                f"wire.interface is set, so nodes talk over TCP: put the same secret into the environment variable "
                f"{wire.secret_env} of every node before Ray starts there"
            )
        addresses.append(f"tcp:{node_host(wire)}:{wire.ports}")
    return addresses


def node_host(wire: WireConfig) -> str | None:
    """Returns this node's address for internal sockets, or None where everything stays inside one node.

    Raises RuntimeError if the node does not have exactly one address in the network `wire.interface`.
    """
    if wire.interface in (None, "auto"):
        return ray.util.get_node_ip_address() if wire.interface else None
    network = ipaddress.ip_network(wire.interface)
    has = [str(ip) for ip in _own_addresses() if ip.version == network.version]
    inside = [ip for ip in has if ipaddress.ip_address(ip) in network]
    if len(inside) != 1:
        raise RuntimeError(
            f"wire.interface is {network}, where this node has {' and '.join(inside) or 'no address'} (it has "
            f"{', '.join(has)}): name a network in which each node has exactly one address"
        )
    return inside[0]


def _own_addresses() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    families = (socket.AF_INET, socket.AF_INET6)
    found = [a.address for device in psutil.net_if_addrs().values() for a in device if a.family in families]
    # a link-local address of IPv6 has its device behind a percent sign
    return [ipaddress.ip_address(address.partition("%")[0]) for address in found]


class RouterReplica:
    """The router's process: it serves the dispatcher on the router's sockets.

    There is one replica. While it is away the ingresses decide alone.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, router: RouterConfig, wire: WireConfig
    ) -> None:
        from actors.router.forecasts import Forecasts
        from actors.router.journal import RouterJournal
        from actors.router.network.feed import RouterNetwork
        from actors.router.server import RouterServer
        from policies.dispatch.dispatcher import Dispatcher
        from policies.routing.registry import decode_policy, prefill_policy

        dispatcher = Dispatcher(
            router.dispatch_config(),
            prefill_policy(router.prefill.name, router.prefill.params),
            decode_policy(router.decode.name, router.decode.params),
        )
        predictor = router.predictor_config()
        forecasts = Forecasts(predictor, refit_in_ray) if predictor.enabled else None
        me = Identity("router", f"router-{uuid.uuid4().hex[:8]}", wire.secret())
        generation = next_generation(serve.get_replica_context().app_name)
        network = RouterNetwork(router.network_config(), ray.nodes)
        journal = RouterJournal(
            router.journal_config(), dispatcher, importlib.metadata.version("sluice-server")
        )
        self._server = RouterServer(
            me,
            dispatcher,
            router.engine_grace_s,
            forecasts,
            network,
            journal,
            generation,
            router.regime_thresholds(),
            router.role_switch_config(),
        )
        await self._server.start(listen_addresses(wire, "router"))
        garbage.settle()
        log.info("router of generation %d listens on %s", generation, ", ".join(self._server.addresses))

    async def addresses(self) -> tuple[str, ...]:
        """Returns the addresses at which this router takes connections."""
        return self._server.addresses

    async def explain(self, attempt_id: str) -> list[dict[str, Any]]:
        """Returns the logged decisions of one request, oldest first."""
        return self._server.decisions.explain(attempt_id)

    async def __del__(self) -> None:
        if hasattr(self, "_server"):
            await self._server.stop()


def next_generation(application: str) -> int:
    """Returns the generation of a new router: a number above that of each router of `application` before it.

    The numbers are counted in Ray's store, which lives as long as the application; no clock is asked, because clocks
    may jump. Returns 0 if the store cannot be used. Such a router is not fenced: another one may decide beside it, so
    that engines may get more work than they have slots for, which then waits there. Nothing is lost or wrong.
    """
    counters = f"router-generation/{application}/"
    try:
        taken = [int(key.rpartition(b"/")[2]) for key in _internal_kv_list(counters, namespace="sluice")]
        generation = max(taken, default=0) + 1
        # of two routers that start at once, the second finds the number taken
        while _internal_kv_put(f"{counters}{generation}", b"1", overwrite=False, namespace="sluice"):
            generation += 1
        for number in taken:
            _internal_kv_del(f"{counters}{number}", namespace="sluice")
    except Exception as error:
        # Ray's client raises errors of many kinds
        log.warning("Ray's store gives this router no generation (%r), so it is not fenced", error)
        return 0
    return generation


async def refit_in_ray(job: Any) -> Any:
    """Runs a predictor's refit as a Ray task, in a worker process of its own, which lowers its priority."""
    from predictors.promote import refit

    return await ray.remote(num_cpus=0, max_calls=1)(refit).remote(job)


class EngineReplica:
    """Runs one engine, its socket server and its reports to the router; drains the engine before it ends."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        model: ModelConfig,
        config: EngineConfig,
        cores: CoreShare | None,
        wire: WireConfig,
        flow: FlowShare | None,
        router: Any,
    ) -> None:
        from actors.engine.report import Reporter
        from actors.engine.server import EngineServer
        from actors.engine.topology import labels_of_process

        context = serve.get_replica_context()
        node_id = ray.get_runtime_context().get_node_id()
        node = config.topology.node or node_id
        engine_id = f"{config.name}-{uuid.uuid4().hex[:8]}"
        defaults: dict[str, Any] = {"side_channel_host": node_host(wire) or "127.0.0.1"}
        if cores is not None:
            shares = divide_cores(usable_cores(), cores.engines)
            defaults["cores"] = shares[(cores.at + context.rank.local_rank) % len(shares)]
        if flow is not None:
            self._agent = AgentKeeper(context.app_name, node_id, flow, wire)
            await self._agent.start()
            defaults |= {"flow_agent": self._agent.address, "flow_node": node}
        engine = make_engine(model, config, engine_id, **defaults)
        me = Identity("engine", engine_id, wire.secret())
        self._server = EngineServer(
            engine,
            me,
            listen_addresses(wire, engine_id),
            node=node,
            replica=context.replica_id.unique_id,
            labels=labels_of_process() | config.topology.labels(),
        )
        await self._server.start()
        self._reporter = Reporter(me, self._server, finder(router))
        self._reporter.start()
        self._drain_point = DrainPoint(socket_directory(wire.socket_dir), engine_id, self._drain)
        await self._drain_point.start()
        garbage.settle()
        log.info("engine %s is ready on %s", engine_id, ", ".join(self._server.info().addresses))

    async def check_health(self) -> None:
        """Answers Serve's health probe; an exception makes Serve replace the replica."""
        await self._server.check_health()

    async def _drain(self, seconds: float) -> None:
        self._server.refuse_new_work()
        self._reporter.announce()
        await self._server.drain(timeout_s=seconds)

    async def __del__(self) -> None:
        if hasattr(self, "_agent"):
            self._agent.stop()
        if hasattr(self, "_drain_point"):
            await self._drain_point.stop()
        if hasattr(self, "_reporter"):
            await self._drain(DRAIN_S)
            await self._reporter.stop()
        if hasattr(self, "_server"):
            await self._server.stop()


def make_engine(model: ModelConfig, config: EngineConfig, engine_id: str, **defaults: Any) -> "Engine":
    """Returns an engine that is not started yet.

    Packages that its kind needs are imported here, so only in its own replica process.
    """
    kind, files = ENGINES[config.kind], model.served_name
    if kind.loads_model:
        from app.models import resolve

        files = str(resolve(model.path))
    return kind.make(config.engine_config(engine_id, files, model.served_name, **defaults))


def finder(router: "DeploymentHandle[Any]") -> Any:
    """Returns an async callable that asks Ray Serve for the router's addresses."""

    async def find() -> tuple[str, ...]:
        return tuple(await router.addresses.remote())

    return find
