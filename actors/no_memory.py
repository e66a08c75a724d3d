"""The end of a process that gets no memory in the middle of work that others count on.

Nobody knows which half of the work was done. A process that lives on in that state, and answers, is worse than none:
its successor starts from what the others tell it, within the time that any death of a process takes.
"""

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, NoReturn

EXIT_STATUS = 75
"""Exit status of a process that got no memory: EX_TEMPFAIL of sysexits.h, since a successor may well get it."""

# written without an allocation of its own
_TEXT = b"this process gets no memory, and ends so that a successor takes over; give it more, or less to do\n"


PROBE_BYTES = 1 << 20


def is_behind(error: BaseException | None) -> bool:
    """Returns whether an error comes of a lack of memory: a MemoryError does, and a SystemError if there is still none.
    Compiled code, such as numba's, may report an allocation that failed as a SystemError.
    """
    if not isinstance(error, SystemError):
        return isinstance(error, MemoryError)
    try:
        bytearray(PROBE_BYTES)
    except MemoryError:
        return True
    return False


def end_if_behind(error: BaseException | None) -> None:
    """Ends this process if an error comes of a lack of memory."""
    if is_behind(error):
        end()


def end() -> NoReturn:
    """Ends this process at once, without any work that would need memory."""
    try:
        os.write(2, _TEXT)
    finally:
        os._exit(EXIT_STATUS)


async def or_end(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work`, and ends the process if it gets no memory."""
    try:
        await work
    except (MemoryError, SystemError) as error:
        end_if_behind(error)
        raise


def watch() -> None:
    """Ends the process when a callback or a forgotten task of the running event loop gets no memory: what it was to do
    is not done by anybody else. Other errors are handled as before.
    """
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()

    def handle(at: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        end_if_behind(context.get("exception"))
        if before is None:
            at.default_exception_handler(context)
        else:
            before(at, context)

    loop.set_exception_handler(handle)
