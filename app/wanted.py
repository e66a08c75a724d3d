"""Ray actors that nobody owns: processes of an application want them, and they end when nobody has for a while."""

import asyncio
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.router.worker_thread import WorkerThread

log = logging.getLogger("ray.serve")

NAMESPACE = "sluice"
WANTED_S = 2.0
"""Seconds between two notes that an actor is wanted."""
ANSWER_S = 10.0
"""Longest wait for the answer of an actor, which may be starting."""
UNWANTED_S = 30.0
"""Seconds after which an actor that nobody wants ends. ASSUMPTION: longer than Ray's control process may be away, and
short enough for nobody to miss the processes of an application that has ended."""


def environment_of_actor(variables: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """Returns the runtime environment of an actor that this process starts, with these variables. Actors inherit the
    command that stands for Python from the process that starts them, and none of these may take a pre-warmed process
    (`app.prewarmed`).
    """
    made: dict[str, Any] = {"env_vars": dict(variables)} if variables else {}
    if ray.get_runtime_context().runtime_env.get("py_executable"):
        made["py_executable"] = shlex.quote(sys.executable)
    return made or None


class Wanted:
    """An actor that ends itself when nobody has wanted it for a while."""

    _watch: asyncio.Task[None]

    def _wanted_by_others(self, name: str, unwanted_s: float) -> None:
        """Begins to watch. Must be called in the actor's event loop."""
        self._name, self._unwanted_s = name, unwanted_s
        self._wanted = True
        self._watch = asyncio.create_task(self._look_after())

    async def wanted(self) -> int:
        """Notes that somebody wants this actor, and returns its process id."""
        self._wanted = True
        return os.getpid()

    async def _look_after(self) -> None:
        """Ends this actor when nobody wants it any more."""
        while True:
            self._wanted = False
            await asyncio.sleep(self._unwanted_s)
            if not self._wanted:
                log.info("%s: nobody has wanted it for %g s: it ends", self._name, self._unwanted_s)
                await self._end()
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _end(self) -> None:
        """Gives up what the actor holds."""
        raise NotImplementedError


class Hold:
    """A hold on an actor that others may want as well: it starts the actor where there is none of its `name`, and says
    that it is wanted. `kind` is the actor's class.

    With `node_id` the actor runs on that node, else wherever Ray has room. `variables` are in its environment.
    """

    def __init__(
        self,
        kind: type[Wanted],
        name: str,
        arguments: tuple[Any, ...],
        node_id: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._kind, self._name, self._arguments = kind, name, arguments
        self._node_id, self._variables = node_id, variables
        self._thread = WorkerThread(f"hold on {kind.__name__}")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to keep the actor alive, in the background."""
        self._task = asyncio.create_task(self._keep(), name=f"hold on {self._name}")

    def stop(self) -> None:
        """Wants the actor no longer. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _is_needed(self) -> bool:
        """Returns whether the actor is wanted now."""
        return True

    async def _keep(self) -> None:
        while True:
            try:
                if await self._is_needed():
                    await self._thread.call(self._want)
            except Exception as error:
                # Ray's client raises errors of many kinds
                log.warning("%s: it may be missing (%r); tried again", self._name, error)
            await asyncio.sleep(WANTED_S)

    def _want(self) -> None:
        place: dict[str, Any] = {}
        if self._node_id is not None:
            place["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._node_id, soft=False)
        actor = (
            ray.remote(self._kind)
            .options(
                name=self._name,
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1,
                runtime_env=environment_of_actor(self._variables),
                **place,
            )
            .remote(*self._arguments)
        )
        ray.get(actor.wanted.remote(), timeout=ANSWER_S)
