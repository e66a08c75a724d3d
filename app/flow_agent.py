"""The flow agent of a node as a Ray actor: named, one for each application, node and configuration.

The engine replicas of a node start it and then say every `WANTED_S` that they want it. Ray restarts an agent that
dies, and one that nobody has wanted for `UNWANTED_S` ends itself: after `serve shutdown`, or when the last engine has
left the node. It listens on a unix socket whose path follows from its name, so workers find a restarted agent where
the first one was.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from pydantic_core import to_json
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.router.worker_thread import WorkerThread
from actors.wire.channel import Identity
from app.config import FlowConfig, WireConfig
from app.drain import socket_directory

log = logging.getLogger("ray.serve")

NAMESPACE = "sluice"
WANTED_S = 2.0
"""Seconds between two notes of an engine replica that it wants its agent."""
ANSWER_S = 10.0
"""Longest wait for the answer of an agent, which may be starting."""
UNWANTED_S = 30.0
"""Seconds after which an agent that nobody wants ends. ASSUMPTION: longer than Ray's control process may be away, and
short enough for nobody to miss the processes of an application that has ended."""


class FlowShare(NamedTuple):
    """Configuration of flow scheduling as an engine replica gets it, with the names given to nodes."""

    config: FlowConfig
    named_nodes: tuple[str, ...]
    unwanted_s: float = UNWANTED_S


def agent_name(application: str, node_id: str, flow: FlowShare) -> str:
    """Returns the name of the actor on this node. Another configuration has an agent of its own."""
    digest = hashlib.sha256(to_json((application, node_id, flow))).hexdigest()
    return f"flow-{digest[:16]}"


def agent_address(name: str, wire: WireConfig) -> str:
    """Returns the address at which the agent of that name listens."""
    return f"unix:{os.path.join(socket_directory(wire.socket_dir), name)}.sock"


class AgentActor:
    """The actor: an agent, and the watch over whether it is still wanted."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, name: str, application: str, node_id: str, flow: FlowShare, wire: WireConfig
    ) -> None:
        from actors.flow.agent import FlowAgent

        self._name, self._unwanted_s = name, flow.unwanted_s
        self._named = frozenset(flow.named_nodes) | {node_id}
        self._nodes = set(self._named)
        self._wanted = True
        self._agent = FlowAgent(
            Identity("agent", name, wire.secret()),
            node_id,
            self._nodes,
            flow.config.agent_config(),
            _router_of(application),
        )
        await self._agent.start([agent_address(name, wire)])
        self._watch = asyncio.create_task(self._look_after())

    async def wanted(self) -> int:
        """Notes that an engine wants this agent, and returns its process id."""
        self._wanted = True
        return os.getpid()

    async def _look_after(self) -> None:
        """Learns the cluster's nodes, and ends this actor when nobody wants it any more."""
        thread = WorkerThread("cluster")
        while True:
            with contextlib.suppress(Exception):
                # Ray's client raises errors of many kinds while its control process is away
                known = await thread.call(ray.nodes)
                self._nodes |= {node["NodeID"] for node in known}
            self._wanted = False
            await asyncio.sleep(self._unwanted_s)
            if not self._wanted:
                log.info(
                    "%s: no engine has wanted this agent for %g s: it ends", self._name, self._unwanted_s
                )
                await self._agent.stop()
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _router_of(application: str) -> Callable[[], Any]:
    async def find() -> tuple[str, ...]:
        from ray import serve

        return tuple(await serve.get_deployment_handle("Router", application).addresses.remote())

    return find


class AgentKeeper:
    """An engine replica's hold on the agent of its node: it starts the agent, and says that it is wanted."""

    def __init__(self, application: str, node_id: str, flow: FlowShare, wire: WireConfig) -> None:
        self._name = agent_name(application, node_id, flow)
        self.address = agent_address(self._name, wire)
        self._arguments = (self._name, application, node_id, flow, wire)
        self._node_id = node_id
        self._thread = WorkerThread("flow agent")
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts to keep the agent alive, in the background: without it, reads are posted without permits."""
        self._task = asyncio.create_task(self._keep(), name="flow agent")

    def stop(self) -> None:
        """Wants the agent no longer. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _keep(self) -> None:
        while True:
            try:
                await self._thread.call(self._want)
            except Exception as error:
                # Ray's client raises errors of many kinds
                log.warning("flow agent %s: it may be missing (%r); tried again", self._name, error)
            await asyncio.sleep(WANTED_S)

    def _want(self) -> None:
        actor = (
            ray.remote(AgentActor)
            .options(
                name=self._name,
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._node_id, soft=False),
            )
            .remote(*self._arguments)
        )
        ray.get(actor.wanted.remote(), timeout=ANSWER_S)
