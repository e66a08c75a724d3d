"""The router's clock: Unix time when the process began, and the monotonic clock from then on.

The router judges leases, queues and the ages of reports by this clock. The machine's clock may therefore be set (a step
of NTP, a virtual machine that was suspended) without ending one of them, and the times of the journal never go back.
"""

import time

_START_S = time.time() - time.monotonic()


def clock_s() -> float:
    """Returns the present time in seconds since 1970, as far as the machine knew it when this process began."""
    return _START_S + time.monotonic()
