"""The queue of calls to vLLM's core, which leave in the order in which they were posted."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from actors.engine.vllm.task import EngineTask

log = logging.getLogger(__name__)

Send = Callable[[], Awaitable[Any]]


class Outbox:
    """A queue of calls to vLLM's core, which leave in the order in which they were posted.

    Adding, aborting and releasing are coroutines in vLLM, while the engine's methods are plain calls. One asyncio task
    awaits the coroutines in turn, so that an abort never overtakes its add. `on_refused(task, error)` is called when
    the core did not take a call that was posted for `task`.
    """

    def __init__(self, on_refused: Callable[[EngineTask | None, Exception], None]) -> None:
        self._on_refused = on_refused
        self._queue: deque[tuple[Send, EngineTask | None]] = deque()
        self._filled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to send, first the calls that were posted before."""
        self._task = asyncio.create_task(self._run(), name="vllm outbox")

    def stop(self) -> None:
        """Sends nothing more. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    def post(self, send: Send, task: EngineTask | None = None) -> None:
        """Has `send()` awaited after everything posted before it."""
        self._queue.append((send, task))
        self._filled.set()

    async def _run(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._queue:
                send, task = self._queue.popleft()
                try:
                    await send()
                except Exception as e:
                    # Any error means a dead core; Serve learns of it from the health check.
                    log.warning("the vLLM core took no message: %r", e)
                    self._on_refused(task, e)
