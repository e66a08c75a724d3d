"""How the processes of a CPU engine wait for one another: asleep, until they are told or for a millisecond.

vLLM's core and workers talk through shared memory, and who waits there calls `sched_yield` in a loop for up to a second
after the last message. That is right where each has a core of its own. On the cores that an engine shares with others
two idle processes take all that the others leave, and worse: on Linux 6.18 a process that woke up there, the client,
waited up to a second for the core, and tokens came in one burst at the end. ASSUMPTION: because a yield gives up the
rest of a slice, thousands of times a second, so that the queue's virtual time runs ahead. Asleep, none of it was seen.
"""

import os
import time
from typing import Any

NAP_ENV = "SLUICE_NAP"
NAP_MS = 1
RECENT_S = 1.0  # so long vLLM spins after a message


def nap_instead_of_spinning() -> None:
    """In a process of a CPU engine (`NAP_ENV` is set): its readers of shared memory sleep. Idempotent."""
    if not os.environ.get(NAP_ENV):
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    spinning = SpinCondition.wait
    if getattr(spinning, "naps", False):
        return

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        """vLLM's idle wait, which a written message ends at once; for at most a moment while messages are frequent."""
        self.busy_loop_s = -1.0
        recent = time.monotonic() <= self.last_read + RECENT_S
        spinning(self, NAP_MS if recent else timeout_ms)

    wait.naps = True  # type: ignore[attr-defined]
    SpinCondition.wait = wait
