"""The watch over the engine cores of a vLLM engine, one core for each data-parallel rank.

vLLM notices a core whose process has ended. A core that lives but stands still (stopped, deadlocked, waiting for a
worker that hangs) it never notices, and its health check passes. Here each core has a `Watchdog`: its scheduler's
reports are steps, and after two seconds without one it is pinged: its main loop answers the call between two steps.

A lost core is killed together with its workers by SIGKILL, which ends a stopped process as well.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import psutil

from actors.engine.watchdog import PING_S, TICK_S, StallLimits, Watchdog
from actors.wire.messages import EngineState

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

PING = "is_scheduler_paused"
"""vLLM's cheapest utility call, which reads one field of the scheduler."""


class CoreWatch:
    """Watches the cores of `llm`. All methods belong to the engine's event loop."""

    def __init__(self, llm: "AsyncLLM", limits: StallLimits) -> None:
        self._llm = llm
        self._core: Any = llm.engine_core
        self._dogs = [Watchdog(limits) for _ in self._core.core_engines]
        self._pings: dict[int, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._killed = False

    @property
    def state(self) -> EngineState:
        """The state of the whole engine: "down" if a core has died or is lost, "stalled" if one stands still."""
        if self._llm.errored or any(dog.condition == "lost" for dog in self._dogs):
            return "down"
        return "stalled" if any(dog.condition == "stalled" for dog in self._dogs) else "ready"

    @property
    def silent_s(self) -> float:
        """Seconds for which the most silent core has certainly stood still. An idle core shows itself every `PING_S`
        and a tick only.
        """
        return max(0.0, max(dog.silence_s for dog in self._dogs) - PING_S - TICK_S)

    @property
    def stalls(self) -> int:
        """Number of times that a core stood still."""
        return sum(dog.stalls for dog in self._dogs)

    def check(self) -> None:
        """Raises RuntimeError if a core is lost."""
        for rank, dog in enumerate(self._dogs):
            if dog.condition == "lost":
                raise RuntimeError(
                    f"vLLM's engine core {rank} has given no sign of life for {dog.silence_s:.0f} s; it is killed"
                )

    def step(self, rank: int) -> None:
        """Takes the report of a finished step of core `rank`."""
        self._dogs[rank].step()

    def start(self) -> None:
        """Begins to watch."""
        self._task = asyncio.create_task(self._watch(), name="watch over vLLM's cores")

    def stop(self) -> None:
        """Ends the watch. Idempotent."""
        for task in (self._task, *self._pings.values()):
            if task is not None:
                task.cancel()

    def kill(self) -> None:
        """Kills the cores and their workers for certain. Idempotent."""
        if self._killed:
            return
        self._killed = True
        for pid in self._pids():
            try:
                core = psutil.Process(pid)
                # The workers are listed first, because they lose their parent with the core.
                tree = [core, *core.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            for process in tree:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue

    def _pids(self) -> list[int]:
        manager = self._core.resources.engine_manager
        return [] if manager is None else [process.pid for process in manager.processes if process.pid]

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = loop.time()
            try:
                for rank, dog in enumerate(self._dogs):
                    self._look(rank, dog, now_s - last_s)
            except Exception:
                # A bug. The watch must go on, because nothing else notices a core that stands still.
                log.exception("the watch over vLLM's cores failed; it goes on")
            last_s = now_s

    def _look(self, rank: int, dog: Watchdog, elapsed_s: float) -> None:
        before = dog.condition
        condition = dog.lived(elapsed_s)
        if condition != before:
            log.error(
                "vLLM's engine core %d is %s: no step and no answer for %.1f s (limit of a stall: %.1f s)",
                rank, condition, dog.silence_s, dog.stall_s,
            )  # fmt: skip
        if condition == "lost":
            self.kill()
        elif dog.silence_s > PING_S and rank not in self._pings:
            ping = self._pings[rank] = asyncio.create_task(self._ping(rank, dog))
            ping.add_done_callback(lambda _: self._pings.pop(rank, None))

    async def _ping(self, rank: int, dog: Watchdog) -> None:
        try:
            await self._core._call_utility_async(PING, engine=self._core.core_engines[rank])
        except Exception as error:
            # The core is dead, which `errored` says as well; the next ping waits for another period.
            log.info("vLLM's engine core %d took no ping: %r", rank, error)
            await asyncio.sleep(PING_S)
            return
        dog.sign()
