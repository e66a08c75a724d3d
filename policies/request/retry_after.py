"""The wait that a refusal names, after which its client may try again. It is spread, so that those who were refused
together do not come back together.

    named_s = w + floor(u * (1 + floor(SPREAD * w)))    w: the expected wait in whole seconds, rounded up, at least 1

u in [0, 1) is the CRC-32 of the attempt's id over 2^32, so the same refusal always names the same wait. Retry-After has
whole seconds: a wait below 1 / SPREAD is named as it is, longer ones differ by whole seconds. Nobody is asked to come
back before the expected wait is over, nor later than SPREAD of it beyond. Not claimed: a spread of the second or two
that the fixed limits of an ingress name.
"""

import math
import zlib

SPREAD = 0.25
"""Largest part by which the named wait is longer than the expected one. ASSUMPTION: a client does not mind it, and
what was refused in a moment comes back over a quarter of the wait.
"""


def named_s(wait_s: float, attempt_id: str) -> float:
    """Returns the whole seconds after which a client may try again. The expected wait is finite."""
    whole = max(1, math.ceil(wait_s))
    later = zlib.crc32(attempt_id.encode()) * (1 + math.floor(SPREAD * whole)) >> 32
    return float(whole + later)
