"""Work that gives way to all other work on the machine's cores."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def work() -> Iterator[None]:
    """Lets this process compute only where nothing else wants to in this context (SCHED_IDLE, sched(7)), and the
    processes that it starts there, until they call `end`.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        yield
    finally:
        end()


def end() -> None:
    """Gives all threads of this process their ordinary share of the cores again."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getscheduler(int(thread)) == os.SCHED_IDLE:
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
