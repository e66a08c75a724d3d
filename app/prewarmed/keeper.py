"""The keeper of a node's pre-warmed processes, a Ray actor: named, one for each application, node and kind of process.

The engine replicas of a node start it and say that they want it, and the autoscaler wants the keepers that there are:
they stay while the application sleeps, and end after it (`app.wanted`).
"""

import asyncio
import hashlib
import logging
import os
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import ray
from pydantic_core import to_json

from actors.engine.cores import divide_cores, usable_cores
from actors.engine.registry import ENGINES
from actors.router.worker_thread import WorkerThread
from app.config import ModelConfig
from app.drain import socket_directory
from app.endpoints import WireConfig
from app.groups import EngineConfig, EngineGroupConfig
from app.prewarmed import launcher
from app.prewarmed.pool import Counts, Pool, start_process
from app.prewarmed.process import Settings
from app.wanted import ANSWER_S, NAMESPACE, UNWANTED_S, WANTED_S, Hold, Wanted

log = logging.getLogger("ray.serve")

LOOK_S = 0.5
"""Seconds between two looks at the pool."""
ENVIRONMENT = {
    # Ray would end all children of the keeper with it, also those that have become workers.
    "RAY_kill_child_processes_on_worker_exit": "false",
    # Where it is set, Ray hides all GPUs from the keeper, which has none, and so from the processes that it makes. Ray
    # notes the GPUs that a process may have when it is imported, so these would stay without any.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Environment of a keeper's process."""


class PrewarmedShare(NamedTuple):
    """How many processes wait on each node for engines of a group, and what they import for.

    `engines` is the number of engines that divide a node's cores, None where engines have none of their own.
    """

    number: int
    model: ModelConfig
    engine: EngineConfig
    engines: int | None
    environment: dict[str, str]
    unwanted_s: float = UNWANTED_S

    @property
    def key(self) -> str:
        """Names all that a process depends on. Groups whose engines differ in model, role or size only share one."""
        kind = ENGINES[self.engine.kind]
        options = {name: value for name, value in self.engine.options.items() if name in kind.pools}
        facts = (self.number, self.model.path, self.engine.kind, options, self.engines, self.environment)
        return hashlib.sha256(to_json((*facts, self.unwanted_s))).hexdigest()[:12]

    def folder(self, wire: WireConfig) -> Path:
        """Returns the folder in which the processes wait on each node."""
        return Path(socket_directory(wire.socket_dir), f"pre-{self.key}")

    def python(self, wire: WireConfig) -> str:
        """Returns the command that stands for Python where Ray starts the process of a replica. The path of Python must
        be the same on every node.
        """
        return shlex.join([sys.executable, "-I", "-S", launcher.__file__, str(self.folder(wire))])


def share_of(
    number: int, model: ModelConfig, group: EngineGroupConfig, engines: int | None
) -> PrewarmedShare | None:
    """Returns the share of a group; None if nothing is pre-warmed for it."""
    if not number or not group.prewarms:
        return None
    return PrewarmedShare(number, model, group.engine, engines if group.shares_cores else None, group.env)


def prefix(application: str, key: str) -> str:
    """Returns how the names of the keepers of all nodes begin, of one application and kind of process."""
    return f"prewarmed-{hashlib.sha256(application.encode()).hexdigest()[:8]}-{key}-"


class KeeperActor(Wanted):
    """The keeper's actor."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, name: str, share: PrewarmedShare, wire: WireConfig
    ) -> None:
        from actors.engine.vllm import plugin

        self._thread = WorkerThread("pre-warmed processes")
        folder = share.folder(wire)
        environment = os.environ | share.environment | {plugin.PARENT_ENV: str(os.getpid())}
        code = f"{plugin.spawned_child_code()}import sys; from app.prewarmed import process; process.main(sys.argv[1])"

        def start(cores: tuple[int, ...] | None) -> Any:
            settings = Settings(model=share.model, engine=share.engine, cores=cores, folder=str(folder))
            return start_process(code, settings.model_dump_json(), environment)

        shares = () if share.engines is None else divide_cores(usable_cores(), share.engines)
        claims = Path(socket_directory(wire.socket_dir), "cores")
        self._pool = Pool(share.number, folder, start, shares, claims, time.monotonic)
        self._counts = Counts()
        self._keeping = asyncio.create_task(self._keep(), name="pre-warmed processes")
        self._wanted_by_others(name, share.unwanted_s)

    async def counts(self) -> dict[str, int]:
        """Notes that somebody wants the keeper, and returns the numbers of its processes by their state."""
        await self.wanted()
        return asdict(self._counts)

    async def _keep(self) -> None:
        while True:
            try:
                self._counts = await self._thread.call(self._pool.look)
            except OSError as error:
                log.warning("no process can be pre-warmed (%s); tried again", error)
            await asyncio.sleep(LOOK_S)

    async def _end(self) -> None:
        self._keeping.cancel()
        await self._thread.call(self._pool.close)


class PrewarmedKeeper(Hold):
    """An engine replica's hold on the keeper of its node, from when the engine has started; while that is missing,
    starts are ordinary ones.
    """

    def __init__(self, application: str, node_id: str, share: PrewarmedShare, wire: WireConfig) -> None:
        node = hashlib.sha256(node_id.encode()).hexdigest()[:8]
        name = f"{prefix(application, share.key)}{node}"
        super().__init__(KeeperActor, name, (name, share, wire), node_id, ENVIRONMENT)


class PrewarmedCounts:
    """The autoscaler's hold on all keepers of its application: they stay while no engine runs, and it learns how many
    processes wait.
    """

    def __init__(self, application: str, keys: tuple[str, ...]) -> None:
        self._prefixes = tuple(prefix(application, key) for key in keys)
        self._thread = WorkerThread("pre-warmed counts")
        self._task: asyncio.Task[None] | None = None
        self.gauges: dict[str, float] = {}
        """Numbers of processes of all nodes by their state, under the names of the router's metrics."""

    def start(self) -> None:
        """Starts to ask the keepers, in the background, if there can be any."""
        if self._prefixes:
            self._task = asyncio.create_task(self._ask_on(), name="pre-warmed counts")

    def stop(self) -> None:
        """Wants the keepers no longer. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _ask_on(self) -> None:
        while True:
            try:
                self.gauges = await self._thread.call(self._ask)
            except Exception as error:
                # Ray's client raises errors of many kinds
                log.warning("the pre-warmed processes cannot be counted (%r); tried again", error)
            await asyncio.sleep(WANTED_S)

    def _ask(self) -> dict[str, float]:
        found = ray.util.list_named_actors(all_namespaces=True)
        names = [
            one["name"]
            for one in found
            if one["namespace"] == NAMESPACE and one["name"].startswith(self._prefixes)
        ]
        answers = [ray.get_actor(name, NAMESPACE).counts.remote() for name in names]
        sums: dict[str, float] = {f"prewarmed_processes_{state}": 0.0 for state in asdict(Counts())}
        for counts in ray.get(answers, timeout=ANSWER_S):
            for state, number in counts.items():
                sums[f"prewarmed_processes_{state}"] += number
        return sums
