"""A thread for calls that may hang (on a disk, or in Ray's control plane), which the process does not wait for when it
ends.

The interpreter joins the threads of `concurrent.futures` before it ends, so one write to a dead disk would keep a
process alive that has nothing left to do. This thread is a daemon: the process ends, and a call that hangs is lost.
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
    """Runs calls one after another, in the order in which `call` and `post` were called. The thread starts with the
    first.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def post(self, what: Callable[[], None]) -> None:
        """Has the thread run `what`, which must not raise, and returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(what)

    async def call(self, what: Callable[[], T]) -> T:
        """Runs `what` in the thread and returns its result, or raises its error. Cancelling the caller does not stop
        `what`.
        """
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
            except BaseException as raised:  # `settle` passes it on
                error = raised
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:  # the loop is closed: the process ends
                log.info("%s: a call ended after the event loop (%r)", self._name, error)

        self.post(run)
        return await future

    @property
    def waiting(self) -> int:
        """Number of calls that have not started yet."""
        return self._queue.qsize()

    def close(self) -> None:
        """Has the thread end after the calls that are queued, without waiting for it. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread = None

    async def end(self, last: Callable[[], None], limit_s: float) -> bool:
        """Runs `last` after the queued calls and closes the thread. Returns whether all calls ended within `limit_s`;
        raises the error of `last`.
        """
        ending = asyncio.ensure_future(self.call(last))
        await asyncio.sleep(0)  # `last` is in the queue after this
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
            # otherwise the call's arguments would stay in memory until the next call
            del what
