"""NIXL agents whose progress threads nap, and which several threads may call."""

import contextlib
from collections.abc import Iterator
from typing import Any

# Longest sleep of NIXL's progress thread if it shares its core with the model (see tuned).
CPU_DELAY_US = 1000


@contextlib.contextmanager
def tuned(module: Any, delay_us: int) -> Iterator[None]:
    """Makes the NIXL agents that the package's module `module` creates in this context safe for several threads, and
    their progress threads sleep up to `delay_us` between two polls of the network. With 0 they spin, as NIXL's Python
    package has them do.

    The spinning thread takes a whole core. On a CPU engine that is the core that computes. Measured on two cores, a 26
    MB read between two agents took 28 ms (median) with both spinning; at 1,000 us it took 3 ms, with 2 % of a core
    each; at 10,000 us it took 24 ms. NIXL's C++ library has the setting, but its Python package always sets it to 0.
    The delay is the timeout of a `poll` on UCX's events, in whole milliseconds rounded up (`nixlUcxSharedThread::run`):
    an event ends the sleep, and the timeout is for events that UCX fails to report. A reader that asks for the state of
    its transfer makes progress itself, so the delay matters to the lender of a read that needs its CPU (TCP, shared
    memory), and to notifications.

    NIXL's agents lock nothing by default. With `NIXL_THREAD_SYNC_STRICT` each call takes the agent's lock, so the
    thread that reads and vLLM's own may both call. A request's state is not locked (ai-dynamo/nixl #2049): each
    transfer belongs to one thread.
    """
    bindings = module.nixlBind

    class Bindings:
        def __getattr__(self, name: str) -> Any:
            return getattr(bindings, name)

        def nixlAgent(self, name: str, config: Any) -> Any:
            config.pthrDelay = delay_us
            config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
            return bindings.nixlAgent(name, config)

    module.nixlBind = Bindings()
    try:
        yield
    finally:
        module.nixlBind = bindings
