"""How reads are cut into chunks, of which a permit covers as many as it has bytes for, and when a read is stuck."""

import itertools

from policies.flow.ports import SLOWEST_BYTES_PER_S

CHUNK_BYTES = 65_536
"""Size of a chunk: the least that an arbiter permits by default. A read with a longer one says so (`Flow.least`): a
permit for less would move more than it is for, and the arbiter would go on to permit what has long been posted."""

MOST_CHUNKS = 4096
"""Most chunks of a read. Longer reads have longer chunks."""

FLOOR_BYTES_PER_S = SLOWEST_BYTES_PER_S
"""Bandwidth below which a read counts as stuck."""


def chunks_of(size: int) -> list[int]:
    """Returns the sizes of nearly equal chunks of a read of `size` bytes, which is above 0."""
    number = min(MOST_CHUNKS, -(-size // CHUNK_BYTES))
    ends = [size * i // number for i in range(number + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]
