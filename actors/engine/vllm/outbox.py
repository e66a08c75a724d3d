"""What a vLLM engine sends to its core, in the order in which it was asked for.

Adding, aborting and releasing are coroutines in vLLM while the engine's methods are plain calls. One task passes
them on, so that an abort never overtakes its add.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger(__name__)

Send = Callable[[], Awaitable[Any]]


class Outbox:
    """A queue of coroutines to be. `on_refused(work, error)`: the core did not take what `work` had posted."""

    def __init__(self, on_refused: Callable[[Any, Exception], None]) -> None:
        self._on_refused = on_refused
        self._queue: deque[tuple[Send, Any]] = deque()
        self._filled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to send; what was posted before goes first."""
        self._task = asyncio.create_task(self._run(), name="vllm outbox")

    def stop(self) -> None:
        """Send nothing more. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    def post(self, send: Send, work: Any = None) -> None:
        """Await `send()` once everything posted before has been sent."""
        self._queue.append((send, work))
        self._filled.set()

    async def _run(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._queue:
                send, work = self._queue.popleft()
                try:
                    await send()
                except Exception as e:  # a dead core, whatever it says; the health check tells Serve
                    log.warning("the vLLM core took no message: %r", e)
                    self._on_refused(work, e)
