"""The router's clock: the Unix time at which the process began, advanced by the monotonic clock.

The router judges leases, queues and the ages of reports by this clock. If the machine's clock is set (a step of NTP, a
virtual machine that was suspended), no lease or queue ends because of it, and the times in the journal never go back.
"""

import time

_START_S = time.time() - time.monotonic()


def monotonic_s(at_s: float) -> float:
    """Returns a time of this clock in seconds of the machine's monotonic clock."""
    return at_s - _START_S


def time_of(monotonic_s: float) -> float:
    """Returns the time on this clock of a moment on the machine's monotonic clock."""
    return _START_S + monotonic_s


def clock_s() -> float:
    """Returns the present time in seconds since 1970, as accurate as the machine's clock was when this process
    began.
    """
    return time_of(time.monotonic())
