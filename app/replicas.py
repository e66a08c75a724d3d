"""The classes that Ray Serve runs: thin shells that start a component, connect it, and end it.

Ray places, supervises and restarts these; requests, decisions and tokens never pass through a Serve handle (the one
handle call is `Router.addresses`, made at each connect). Each is a plain class, of which `app.graph` makes a
deployment.
"""

import asyncio
import importlib.metadata
import json
import logging
import time
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import psutil
import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_list, _internal_kv_put

from actors import garbage, no_memory
from actors.code_form import code_form
from actors.engine.cores import claim, divide_cores, usable_cores
from actors.engine.registry import ENGINES
from actors.scaling import fleet
from actors.telemetry import logs
from actors.wire import channel
from actors.wire.environment import hand_down
from app.addresses import finder, listen_addresses, side_channel_host
from app.config import ModelConfig, RouterConfig
from app.drain import DrainPoint, socket_directory
from app.endpoints import WireConfig
from app.flow_agent import AgentKeeper, FlowShare
from app.groups import AutoscalerConfig, EngineConfig, EngineGroupConfig
from app.prewarmed import process
from app.prewarmed.keeper import PrewarmedCounts, PrewarmedKeeper, PrewarmedShare

if TYPE_CHECKING:
    from actors.engine.protocol import Engine
    from actors.engine.server import EngineServer
    from actors.telemetry.start import StartTrace
    from actors.wire.messages import WeightsRead

log = logging.getLogger("ray.serve")

ANNOUNCE_S = 60.0
"""Longest time that the trace of a start waits for the engine's announcement. ASSUMPTION: a router restarts sooner."""
DRAIN_S = 15.0
"""Seconds that an ingress gives its running requests before it ends, where its options do not say otherwise."""


class CoreShare(NamedTuple):
    """An engine's share of its node's CPU cores: `engines` engines divide them, and those of its group like to have the
    shares from number `at` on.
    """

    at: int
    engines: int


class Stay(NamedTuple):
    """How an engine's replica begins and ends.

    It has `drain_s` seconds for running work and leases before it ends. Under an autoscaler the first `active` replicas
    of a group begin to serve at once, and each further one begins warm; None: all serve.
    """

    drain_s: float
    active: int | None = None


def deployment_of(group: str) -> str:
    """Returns the name of the Serve deployment of an engine group."""
    return "".join(part.capitalize() for part in group.split("-")) + "Engine"


def resources_of(group: EngineGroupConfig) -> list[dict[str, float]]:
    """Returns the resources that Ray reserves for one replica, as the bundles of a placement group."""
    if group.placement_group_bundles is not None:
        return group.placement_group_bundles
    own = {"CPU": group.cpus, "GPU": group.num_gpus, **group.resources}
    return [{name: amount for name, amount in own.items() if amount}]


class RouterReplica:
    """The router's process: it serves the dispatcher on the router's sockets.

    There is one replica. While it is away the ingresses decide alone.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, router: RouterConfig, wire: WireConfig
    ) -> None:
        from actors.router.clock import clock_s
        from actors.router.forecasts import Forecasts
        from actors.router.journal import RouterJournal
        from actors.router.network.feed import RouterNetwork
        from actors.router.server import RouterServer
        from actors.telemetry.environment import decision_traces
        from policies.admission.registry import admission_policy
        from policies.dispatch.dispatcher import Dispatcher
        from policies.fairness.registry import fairness_policy
        from policies.routing.registry import decode_policy, prefill_policy

        dispatcher = Dispatcher(
            router.dispatch_config(),
            prefill_policy(router.prefill.name, router.prefill.params),
            decode_policy(router.decode.name, router.decode.params),
            admission_policy(router.admission.name, router.admission.params),
            fairness_policy(router.fairness.name, router.fairness.params),
        )
        predictor = router.predictor_config()
        forecasts = Forecasts(predictor, refit_in_ray) if predictor.enabled else None
        me = wire.identity("router", f"router-{uuid.uuid4().hex[:8]}")
        logs.start("router")
        application = serve.get_replica_context().app_name
        generation = next_generation(application)
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
            decision_traces(me.id, clock_s),
            latest_generation(application, "autoscaler"),
        )
        await self._server.start(listen_addresses(wire, "router"))
        garbage.settle()
        no_memory.watch()
        listens = ", ".join(self._server.addresses)
        log.info("router of generation %d (%s) listens on %s", generation, code_form(channel), listens)

    async def addresses(self) -> tuple[str, ...]:
        """Returns the addresses at which this router takes connections."""
        return self._server.addresses

    async def explain(self, attempt_id: str) -> list[dict[str, Any]]:
        """Returns the logged decisions of one request, oldest first."""
        return self._server.decisions.explain(attempt_id)

    async def __del__(self) -> None:
        if hasattr(self, "_server"):
            await self._server.stop()


def next_generation(application: str, kind: str = "router") -> int:
    """Returns the generation of a new router, or of another kind of process: a number above that of each one of
    `application` before it.

    The numbers are counted in Ray's store, which lives as long as the application; no clock is asked, because clocks
    may jump. Returns 0 if the store cannot be used. Such a router is not fenced: another one may decide beside it, so
    that engines may get more work than they have slots for, which then waits there. Nothing is lost or wrong.
    """
    counters = _counters(application, kind)
    try:
        taken = _generations(counters)
        while True:
            generation = max(taken, default=0) + 1
            # of two routers that start at once, the second finds the number taken
            while _internal_kv_put(f"{counters}{generation}", b"1", overwrite=False, namespace="sluice"):
                generation += 1
            taken = _generations(counters)
            # This number may have been another's, who has a higher one now and has deleted it. The highest number is
            # never deleted, so whoever finds its own to be the highest has it alone.
            if generation == max(taken):
                break
        for number in taken:
            if number < generation:
                _internal_kv_del(f"{counters}{number}", namespace="sluice")
    except Exception as error:
        # Ray's client raises errors of many kinds
        log.warning("Ray's store gives this %s no generation (%r), so it is not fenced", kind, error)
        return 0
    return generation


def latest_generation(application: str, kind: str) -> int:
    """Returns the highest generation that a process of this kind has, or 0 if there was none or the store cannot be
    used.
    """
    try:
        return max(_generations(_counters(application, kind)), default=0)
    except Exception as error:
        # Ray's client raises errors of many kinds
        log.warning("Ray's store does not tell the latest generation of the kind %s (%r)", kind, error)
        return 0


def _counters(application: str, kind: str) -> str:
    return f"{kind}-generation/{application}/"


def _generations(counters: str) -> list[int]:
    return [int(key.rpartition(b"/")[2]) for key in _internal_kv_list(counters, namespace="sluice")]


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
        prewarmed: PrewarmedShare | None,
        stay: Stay,
        router: Any,
    ) -> None:
        began_s = time.time()
        from actors.engine.report import Reporter
        from actors.engine.server import EngineServer
        from actors.engine.topology import labels_of_process
        from actors.telemetry.environment import start_trace

        context = serve.get_replica_context()
        node_id = ray.get_runtime_context().get_node_id()
        node = config.topology.node or node_id
        self._drain_s = stay.drain_s
        engine_id = fleet.engine_id(config.name, context.replica_id.unique_id)
        logs.start("engine", engine_id)
        defaults: dict[str, Any] = {"side_channel_host": side_channel_host(wire)}
        if cores is not None:
            self._cores = claim(
                divide_cores(usable_cores(), cores.engines),
                cores.at + context.rank.local_rank,
                Path(socket_directory(wire.socket_dir), "cores"),
                None if process.taken is None else process.taken.cores,
            )
            defaults["cores"] = self._cores.cores
        if flow is not None:
            hand_down(wire.secret(), wire.tls_folder())
            tcp = tuple(address for address in listen_addresses(wire, "flow") if address.startswith("tcp:"))
            self._agent = AgentKeeper(context.app_name, node_id, flow, wire, tcp)
            self._agent.start()
            defaults |= {"flow_agent": self._agent.address, "flow_node": node}
        me = wire.identity("engine", engine_id)
        if config.options.get("weights_from") == "peer":
            from actors.engine.weights.find import find_sources

            hand_down(wire.secret(), wire.tls_folder())
            defaults |= {
                "weights_listen": tuple(listen_addresses(wire, f"weights-{engine_id}")),
                "weights_sources": await find_sources(me, finder(router), node, model.served_name),
                "flow_node": node,
            }
        engine = make_engine(model, config, engine_id, **defaults)
        self._server = EngineServer(
            engine,
            me,
            listen_addresses(wire, engine_id),
            node=node,
            replica=context.replica_id.unique_id,
            labels=labels_of_process() | config.topology.labels(),
            duty="warm" if stay.active is not None and context.rank.rank >= stay.active else "active",
            began_s=began_s,
        )
        trace = start_trace(engine_id, config.role, config.kind)
        with nullcontext() if trace is None else trace.inherited():
            await self._server.start()
        self._reporter = Reporter(me, self._server, finder(router))
        self._reporter.start()
        self._drain_point = DrainPoint(socket_directory(wire.socket_dir), engine_id, self._drain)
        await self._drain_point.start()
        garbage.settle()
        no_memory.watch()
        # the next start's imports would slow down this one, which is over now
        process.started()
        if prewarmed is not None:
            self._prewarmed = PrewarmedKeeper(context.app_name, node_id, prewarmed, wire)
            self._prewarmed.start()
        log.info("engine %s is ready on %s", engine_id, ", ".join(self._server.info().addresses))
        log.info("start of %s: %s", engine_id, json.dumps(start_of(engine, began_s)))
        if trace is not None:
            self._telling = asyncio.create_task(
                tell_start(trace, self._server, start_of(engine, began_s)["phases"])
            )

    async def check_health(self) -> None:
        """Answers Serve's health probe; an exception makes Serve replace the replica."""
        await self._server.check_health()

    async def _drain(self, seconds: float) -> None:
        self._server.refuse_new_work()
        if hasattr(self, "_cores"):
            # the replica that takes this one's place starts while this one drains
            self._cores.release()
        self._reporter.announce()
        await self._server.drain(timeout_s=seconds)

    async def __del__(self) -> None:
        if hasattr(self, "_agent"):
            self._agent.stop()
        if hasattr(self, "_prewarmed"):
            self._prewarmed.stop()
        if hasattr(self, "_drain_point"):
            await self._drain_point.stop()
        if hasattr(self, "_reporter"):
            await self._drain(self._drain_s)
            await self._reporter.stop()
        if hasattr(self, "_server"):
            await self._server.stop()


async def tell_start(trace: "StartTrace", server: "EngineServer", phases: dict[str, float]) -> None:
    """Sends the trace of an engine's start once the engine is announced, or after `ANNOUNCE_S` without that step."""
    until_s = time.monotonic() + ANNOUNCE_S
    while (started := server.info().started) is None or started.announce_s is None:
        if time.monotonic() > until_s:
            break
        await asyncio.sleep(0.1)
    if started is None:
        return
    steps = {"process": started.process_s, "weights": started.weights_s, "post_load": started.post_load_s}
    if started.announce_s is not None:
        steps["announce"] = started.announce_s
    own = {name: took_s for name, took_s in phases.items() if name != "ready"}
    await asyncio.to_thread(trace.send, started.began_s, steps, own)


def start_of(engine: "Engine", began_s: float) -> dict[str, Any]:
    """Returns the times of a replica's start: `process_at_s` when its process was made or a pre-warmed one was taken,
    `replica_at_s` when Serve made the replica in it (`began_s`), and `ready_at_s` now, all in Unix seconds; whether its
    process was `prewarmed`; the seconds of the engine's own phases, as far as its kind knows them
    (`actors.engine.vllm.launch`); and where its `weights` came from, where that could be another engine.
    """
    taken = process.taken
    read: WeightsRead | None = getattr(engine, "weights", None)
    return {
        "process_at_s": psutil.Process().create_time() if taken is None else taken.at_s,
        "prewarmed": taken is not None,
        "replica_at_s": began_s,
        "ready_at_s": time.time(),
        "phases": dict(getattr(engine, "phases", {})),
        "weights": None if read is None else msgspec.structs.asdict(read),
    }


class AutoscalerReplica:
    """The autoscaler's process: it decides how many engines of each role serve, and has Serve and the router do it.

    There is one replica. While it is away nothing is scaled; what was ordered stays.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: AutoscalerConfig, wire: WireConfig, prewarmed: tuple[str, ...], router: Any
    ) -> None:
        from actors.scaling.control import Controller
        from actors.scaling.journal import ScalingJournal
        from actors.scaling.server import Autoscaler
        from app.counts import RayStore, ServeCounts

        application = serve.get_replica_context().app_name
        logs.start("autoscaler")
        version = importlib.metadata.version("sluice-server")
        groups, journal = config.groups(), config.scaling.journal_config()
        self._counts = counts = ServeCounts(
            application,
            {name: deployment_of(name) for name in groups},
            {group.name: group.scaling.spare for group in config.engines},
            {group.name: resources_of(group) for group in config.engines},
        )
        await counts.check()
        store = RayStore(application)
        generation = next_generation(application, "autoscaler")
        me = wire.identity("autoscaler", f"autoscaler-{uuid.uuid4().hex[:8]}", generation)
        self._prewarmed = PrewarmedCounts(application, prewarmed)
        self._prewarmed.start()
        self._autoscaler = Autoscaler(
            me,
            finder(router),
            Controller(config.policy, groups, version, await store.load(), config.scaling.start_limit_s),
            counts,
            store,
            None if journal.folder is None else ScalingJournal(journal, version),
            lambda: self._prewarmed.gauges,
        )
        self._autoscaler.start()
        garbage.settle()
        no_memory.watch()
        log.info(
            "autoscaler of generation %d decides by %s", generation, self._autoscaler.controller.policy.name
        )

    async def check_health(self) -> None:
        """Answers Serve's health probe; an exception makes Serve replace the replica."""
        self._autoscaler.check()

    async def __del__(self) -> None:
        if hasattr(self, "_prewarmed"):
            self._prewarmed.stop()
        if hasattr(self, "_autoscaler"):
            await self._autoscaler.stop()
            # a successor asks for what it wants at its first look
            await self._counts.close()


def make_engine(model: ModelConfig, config: EngineConfig, engine_id: str, **defaults: Any) -> "Engine":
    """Returns an engine that is not started yet.

    Packages that its kind needs are imported here, so only in its own replica process.
    """
    kind, files = ENGINES[config.kind], model.served_name
    if kind.loads_model:
        from app.models import resolve

        files = str(resolve(model.path))
    return kind.make(config.engine_config(engine_id, files, model.served_name, **defaults))
