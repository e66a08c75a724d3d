"""Calls that may hang (a disk, Ray's control plane), one after another in a thread that no process waits for.

The threads of `concurrent.futures` are joined when the interpreter ends, so that one write to a dead disk would keep a
process that has nothing left to do. This one is a daemon: what hangs in it is left behind.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from actors.loop_timeout import within

log = logging.getLogger(__name__)

T = TypeVar("T")


class WorkerThread:
    """`call` and `post` keep their order. The thread begins with the first call and ends with `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def post(self, what: Callable[[], None]) -> None:
        """Runs `what` later; it must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(what)

    async def call(self, what: Callable[[], T]) -> T:
        """What `what` returns or raises. Cancelled, it is run all the same."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():
                if error is not None:
                    log.error("%s: a call that nobody waits for any more failed", self._name, exc_info=error)
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # None is a T where `what` returns it

        def run() -> None:
            result, error = None, None
            try:
                result = what()
            except BaseException as raised:  # handed to whoever waits
                error = raised
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:  # the loop is closed: the process ends
                log.info("%s: a call ended after the event loop (%r)", self._name, error)

        self.post(run)
        return await future

    @property
    def waiting(self) -> int:
        """Calls that have not begun."""
        return self._queue.qsize()

    def close(self) -> None:
        """The thread ends after what was given to it; waits for nothing. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread = None

    async def end(self, last: Callable[[], None], limit_s: float) -> bool:
        """Closes after one call more; whether all was done within so many seconds. Raises what `last` raises."""
        ending = asyncio.ensure_future(self.call(last))
        await asyncio.sleep(0)  # it is in the queue now
        self.close()
        if not await within(limit_s, ending):
            ending.cancel()
            return False
        ending.result()
        return True

    def _work(self) -> None:
        while True:
            what = self._queue.get()
            if what is None:
                return
            what()
            del what  # or its arguments would live until the next call
