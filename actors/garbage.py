"""The garbage collector of a process that serves, once it has started."""

import gc

NET_OBJECTS = 10_000
"""Objects made and not freed since the last collection that begin the next one; Python's own value is 700.

A collection looks for cycles, and serving makes hardly any, while a burst of 128 requests alone makes more than 700
objects that live on.
"""


def settle() -> None:
    """Collects now and exempts all that lives from later collections: what a process has loaded never becomes garbage,
    and to walk it takes some 50 ms under Ray. Then lets collections be rare.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NET_OBJECTS)
