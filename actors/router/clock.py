"""The router's clock: Unix time at the start, and from there on the monotonic clock.

Leases, queues and ages of reports are judged by it, so the machine's clock may be set (a step of NTP, a virtual machine
that was suspended) without ending one of them; and the times of the journal never go back.
"""

import time

_START_S = time.time() - time.monotonic()


def clock_s() -> float:
    """Now, s since 1970 as far as the machine knew it when this process began."""
    return _START_S + time.monotonic()
