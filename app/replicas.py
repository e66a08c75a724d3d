"""The classes that Ray Serve runs: thin shells that start a component, connect it, and end it.

Ray places, supervises and restarts these; requests, decisions and tokens never pass through a Serve handle (the one
handle call is `Router.addresses`, asked at each connect). Each is a plain class: `app.graph` makes deployments of them.
"""

import gc
import importlib.metadata
import logging
import os
import tempfile
import uuid
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from actors.wire.channel import Identity
from app.config import AppConfig, EngineGroupConfig, from_options

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from actors.engine.protocol import Engine

log = logging.getLogger("ray.serve")


def listen_addresses(config: AppConfig, name: str) -> list[str]:
    """Where a component of this process listens: always a unix socket, TCP too where an interface is configured.

    Raises RuntimeError when TCP is asked for without a secret: internal sockets between nodes are always authenticated.
    """
    directory = config.wire.socket_dir or os.path.join(tempfile.gettempdir(), f"sluice-{os.getuid()}")
    addresses = [f"unix:{os.path.join(directory, f'{name}-{uuid.uuid4().hex[:8]}.sock')}"]
    if config.wire.interface is not None:
        if config.wire.secret() is None:
            raise RuntimeError(
                f"wire.interface is set, so nodes talk over TCP: put the same secret into the environment variable "
                f"{config.wire.secret_env} of every node before Ray starts there"
            )
        addresses.append(f"tcp:{node_host(config)}:0")
    return addresses


def node_host(config: AppConfig) -> str | None:
    """This node's address on the internal interface; None where everything stays inside one node."""
    return ray.util.get_node_ip_address() if config.wire.interface == "auto" else config.wire.interface


class RouterReplica:
    """Holds the dispatcher on its sockets. One replica; when it dies the ingresses decide alone until it is back."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        from actors.router.forecasts import Forecasts
        from actors.router.journal import RouterJournal
        from actors.router.network.feed import RouterNetwork
        from actors.router.server import RouterServer
        from policies.dispatch.dispatcher import Dispatcher
        from policies.routing.registry import decode_policy, prefill_policy

        router = config.router
        dispatcher = Dispatcher(
            router.dispatch_config(),
            prefill_policy(router.prefill.name, router.prefill.params),
            decode_policy(router.decode.name, router.decode.params),
        )
        predictor = router.predictor_config()
        forecasts = Forecasts(predictor, refit_in_ray) if predictor.enabled else None
        me = Identity("router", f"router-{uuid.uuid4().hex[:8]}", config.wire.secret())
        network = RouterNetwork(router.network_config(), ray.nodes)
        journal = RouterJournal(router.journal_config(), dispatcher, importlib.metadata.version("sluice"))
        self._server = RouterServer(me, dispatcher, router.engine_grace_s, forecasts, network, journal)
        await self._server.start(listen_addresses(config, "router"))
        gc.collect()
        gc.freeze()  # what is loaded by now stays: a full collection would walk it for some 50 ms
        log.info("router listens on %s", ", ".join(self._server.addresses))

    async def addresses(self) -> tuple[str, ...]:
        """Where to connect to this router."""
        return self._server.addresses

    async def explain(self, attempt_id: str) -> list[dict[str, Any]]:
        """The logged decisions of one request."""
        return self._server.decisions.explain(attempt_id)

    async def __del__(self) -> None:
        if hasattr(self, "_server"):
            await self._server.stop()


async def refit_in_ray(job: Any) -> Any:
    """Runs a predictor's refit as a Ray task: in a worker process of its own, which lowers its priority."""
    from predictors.promote import refit

    return await ray.remote(num_cpus=0, max_calls=1)(refit).remote(job)


class EngineReplica:
    """Runs one engine, its socket front and its reports to the router; drains before it goes."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: AppConfig, group: EngineGroupConfig, first_index: int, router: Any
    ) -> None:
        from actors.engine.report import Reporter
        from actors.engine.server import EngineServer
        from actors.engine.topology import labels_of_process

        context = serve.get_replica_context()
        engine_id = f"{group.name}-{uuid.uuid4().hex[:8]}"
        engine = make_engine(config, group, engine_id, first_index + context.rank.local_rank)
        me = Identity("engine", engine_id, config.wire.secret())
        self._group = group
        self._server = EngineServer(
            engine,
            me,
            listen_addresses(config, engine_id),
            node=group.topology.node or ray.get_runtime_context().get_node_id(),
            replica=context.replica_id.unique_id,
            labels=labels_of_process() | group.topology.labels(),
        )
        await self._server.start()
        self._reporter = Reporter(me, self._server, finder(router))
        self._reporter.start()
        log.info("engine %s is ready on %s", engine_id, ", ".join(self._server.info().addresses))

    async def check_health(self) -> None:
        """Serve's probe; raising replaces the replica."""
        await self._server.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_reporter"):
            self._reporter.set_state("draining")
            await self._server.drain(timeout_s=DRAIN_S)
            await self._reporter.stop()
        if hasattr(self, "_server"):
            await self._server.stop()


DRAIN_S = 15.0


def make_engine(config: AppConfig, group: EngineGroupConfig, engine_id: str, index: int) -> "Engine":
    """The engine of a group. Imports of an engine kind happen here, in its own replica process only.

    `index` counts the CPU engines of this node: each gets its own share of the node's cores, or shares one evenly.
    """
    where = f"engines.{group.name}.options"
    if group.kind == "sim":
        from actors.engine.sim.config import SimEngineConfig
        from actors.engine.sim.ranks import sim_engine

        options = {
            "model": config.model.served_name,
            **group.options,
            "engine_id": engine_id,
            "role": group.role,
        }
        return sim_engine(from_options(SimEngineConfig, options, where))
    from actors.engine.cores import divide_cores, usable_cores
    from actors.engine.vllm.config import VllmEngineConfig
    from actors.engine.vllm.engine import VllmEngine
    from app.models import resolve

    shares = divide_cores(usable_cores(), max(1, config.vllm_engines))
    options = {
        "cores": shares[index % len(shares)],
        "side_channel_host": node_host(config) or "127.0.0.1",
        **group.options,
        "model": str(resolve(config.model.path)),
        "served_name": config.model.served_name,
        "id": engine_id,
        "role": group.role,
    }
    return VllmEngine(from_options(VllmEngineConfig, options, where))


def finder(router: "DeploymentHandle[Any]") -> Any:
    """An async callable that asks Ray Serve where the router listens now."""

    async def find() -> tuple[str, ...]:
        return tuple(await router.addresses.remote())

    return find
