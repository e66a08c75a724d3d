"""Ray actors that nobody owns: processes of an application want them, and they end when nobody has for a while."""

import asyncio
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import ray

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
