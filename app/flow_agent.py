"""The flow agent of a node, and the coordinator of several, as Ray actors: named, one agent for each application, node
and configuration, and one coordinator for all agents that find one another.

The engine replicas of a node start it and then say every `WANTED_S` that they want it. Ray restarts an agent that
dies, and one that nobody has wanted for `UNWANTED_S` ends itself: after `serve shutdown`, or when the last engine has
left the node. It listens on a unix socket whose path follows from its name, so workers find a restarted agent where
the first one was, and on TCP where nodes talk over TCP. Agents find one another by their nodes' names in Ray's store.

On one node the agent makes the order between requests itself, in its own process. An agent that finds another in the
store starts the coordinator, wherever Ray has room for it, and wants it as an engine wants its agent; the coordinator's
addresses are in the store, too. While it is away, after its process or its node has died, every agent orders alone.
With `flow.options.coordinator` none is started: the agents use the one at that address.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from pydantic_core import to_json
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

from actors.router.worker_thread import WorkerThread
from app.addresses import listen_addresses
from app.config import FlowConfig
from app.drain import socket_directory
from app.endpoints import WireConfig
from app.wanted import NAMESPACE, UNWANTED_S, Hold, Wanted

log = logging.getLogger("ray.serve")

COORDINATOR = "coordinator"
"""The coordinator's name in its directory."""


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


class AgentActor(Wanted):
    """The agent's actor. It wants the coordinator as long as there is another agent."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        name: str,
        application: str,
        node_id: str,
        flow: FlowShare,
        wire: WireConfig,
        tcp: tuple[str, ...],
    ) -> None:
        from actors.flow.agent import FlowAgent

        config = flow.config.agent_config()
        self._directory = RayDirectory(directory_name(application, flow), flow.named_nodes)
        self._coordinator = CoordinatorKeeper(application, flow, wire, self._directory)
        self._agent = FlowAgent(
            wire.identity("agent", name),
            node_id,
            frozenset(flow.named_nodes),
            config,
            _router_of(application),
            self._directory,
            self._coordinator.addresses,
        )
        await self._agent.start([agent_address(name, wire), *tcp])
        if not config.coordinator:
            self._coordinator.start()
        self._wanted_by_others(name, flow.unwanted_s)

    async def _end(self) -> None:
        self._coordinator.stop()
        await self._agent.stop()


class CoordinatorActor(Wanted):
    """The coordinator's actor. It says in the agents' store where it listens."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, name: str, application: str, flow: FlowShare, wire: WireConfig
    ) -> None:
        from actors.flow.coordinator import Coordinator

        config = flow.config.agent_config()
        me = wire.identity("coordinator", name)
        arbiter = config.arbiter_config()
        self._coordinator = Coordinator(me, config.drop_share, arbiter.port_bytes_per_s, arbiter.most_flows)
        await self._coordinator.start(listen_addresses(wire, "flow-coordinator"))
        self._directory = RayDirectory(coordinator_name(application, flow))
        await self._directory.publish(COORDINATOR, self._coordinator.addresses)
        self._wanted_by_others(name, flow.unwanted_s)

    async def agents(self) -> int:
        """Returns the number of agents that are connected."""
        return self._coordinator.agents

    async def _end(self) -> None:
        try:
            await self._directory.withdraw(COORDINATOR, self._coordinator.addresses)
        except Exception as error:
            # Ray's client raises errors of many kinds; agents then find that the entry leads nowhere
            log.warning("%s is still in the store: %r", self._name, error)
        await self._coordinator.stop()


def directory_name(application: str, flow: FlowShare) -> str:
    """Returns the name of the directory of all agents of an application with one configuration."""
    return f"flow-agents/{hashlib.sha256(to_json((application, flow))).hexdigest()[:16]}"


def coordinator_name(application: str, flow: FlowShare) -> str:
    """Returns the name of the coordinator's actor, and of the directory in which its address is."""
    return f"flow-coordinator-{hashlib.sha256(to_json((application, flow))).hexdigest()[:16]}"


class RayDirectory:
    """The agents' addresses in Ray's store, under the directory's name and the node's. Raises what Ray's client raises,
    for which there is no common type.
    """

    def __init__(self, name: str, named_nodes: tuple[str, ...] = ()) -> None:
        self._name, self._named = name, frozenset(named_nodes)
        self._thread = WorkerThread("flow directory")

    async def exists(self, node: str) -> bool:
        """Returns whether a node has this name, by the configuration, the store or Ray's own list of nodes."""
        if node in self._named or await self.addresses(node):
            return True
        return node in {known["NodeID"] for known in await self._thread.call(ray.nodes)}

    async def addresses(self, node: str) -> tuple[str, ...]:
        """Returns where the node's agent listens; empty if none has said so."""
        found = await self._thread.call(lambda: _internal_kv_get(self._key(node), namespace=NAMESPACE))
        return () if found is None else tuple(json.loads(found))

    async def publish(self, node: str, addresses: tuple[str, ...]) -> None:
        """Puts the agent's addresses into the store, in place of those of an earlier agent."""
        text = json.dumps(addresses).encode()
        await self._thread.call(lambda: _internal_kv_put(self._key(node), text, namespace=NAMESPACE))

    async def withdraw(self, node: str, addresses: tuple[str, ...]) -> None:
        """Takes the addresses out of the store if they are there."""
        if await self.addresses(node) == addresses:
            await self._thread.call(lambda: _internal_kv_del(self._key(node), namespace=NAMESPACE))

    async def several(self) -> bool:
        """Returns whether more than one agent is in the store. One agent may own the ports of several nodes."""
        keys = await self._thread.call(lambda: _internal_kv_list(self._key(""), namespace=NAMESPACE))
        agents: set[tuple[str, ...]] = set()
        for key in sorted(keys):
            agents.add(await self.addresses(key.decode().removeprefix(self._key(""))))
            # one that was withdrawn in between has no address
            if len(agents - {()}) > 1:
                return True
        return False

    def _key(self, node: str) -> str:
        return f"{self._name}/{node}"


def _router_of(application: str) -> Callable[[], Any]:
    async def find() -> tuple[str, ...]:
        from ray import serve

        return tuple(await serve.get_deployment_handle("Router", application).addresses.remote())

    return find


class CoordinatorKeeper(Hold):
    """An agent's hold on the coordinator of several nodes: as long as another agent is in the directory, it starts the
    coordinator and says that it is wanted.
    """

    def __init__(
        self, application: str, flow: FlowShare, wire: WireConfig, directory: "RayDirectory"
    ) -> None:
        name = coordinator_name(application, flow)
        super().__init__(CoordinatorActor, name, (name, application, flow, wire))
        self._agents, self._directory = directory, RayDirectory(name)
        self._several = False

    async def addresses(self) -> tuple[str, ...]:
        """Returns where the coordinator listens; empty while one agent is alone."""
        return await self._directory.addresses(COORDINATOR) if self._several else ()

    async def _is_needed(self) -> bool:
        self._several = await self._agents.several()
        return self._several


class AgentKeeper(Hold):
    """An engine replica's hold on the agent of its node; while it is missing, reads are posted without permits. Agents
    of other nodes reach it at `tcp`, an address of this node to listen at, or not at all.
    """

    def __init__(
        self,
        application: str,
        node_id: str,
        flow: FlowShare,
        wire: WireConfig,
        tcp: tuple[str, ...] = (),
    ) -> None:
        name = agent_name(application, node_id, flow)
        super().__init__(AgentActor, name, (name, application, node_id, flow, wire, tcp), node_id)
        self.address = agent_address(name, wire)
