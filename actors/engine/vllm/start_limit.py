"""A bound on the start of an engine whose processes may hang: their stacks go to the log, and they are killed.

vLLM waits without a limit for a core that is alive and never answers, and Ray Serve for a replica that never starts. A
start that takes longer than its limit fails instead, so that Serve makes another replica.
"""

import asyncio
import contextlib
import faulthandler
import logging
import sys
from collections.abc import Awaitable

import psutil

from actors.engine.vllm.plugin import DUMP_SIGNAL

log = logging.getLogger(__name__)

DUMP_S = 1.0
"""Seconds that the processes get to write their stacks. ASSUMPTION: it takes milliseconds where a core is free."""

END_S = 60.0
"""Seconds for which processes that a failing start still makes are killed: the imports of vLLM, which cannot be
interrupted, take that long on a busy machine."""

KILL_S = 0.2


class StartTimeoutError(RuntimeError):
    """The engine was not ready in time. The message says which option sets the limit."""


async def within(limit_s: float, start: Awaitable[None]) -> None:
    """Awaits `start`, which makes child processes of this process, for at most `limit_s` seconds.

    Raises what `start` raises, or StartTimeoutError after the limit. The children that were made meanwhile are dead
    then.
    """
    before = _children()
    task = asyncio.ensure_future(start)
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if task.done():
            task.result()
            return
        log.error("the engine is not ready after %g s; the stacks of its processes follow", limit_s)
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        for child in _children() - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(DUMP_SIGNAL)
        await asyncio.sleep(DUMP_S)
        # the start ends with its processes, and may make new ones before it notices
        for _ in range(round(END_S / KILL_S)):
            for child in _children() - before:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            await asyncio.wait({task}, timeout=KILL_S)
            if task.done():
                break
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await asyncio.wait({task}, timeout=KILL_S)
    raise StartTimeoutError(
        f"the engine was not ready after {limit_s:g} s, and its processes were killed; their stacks are in the log of"
        " this process. If the model needs longer to load, set start_limit_s in the engine's options"
    )


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))
