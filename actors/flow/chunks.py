"""How long the chunks of a read are, by the bandwidth that has been seen of its source, and when a read is stuck."""

CHUNK_S = 0.010
"""Time that one chunk should take at the bandwidth seen so far, in seconds: what a more urgent read waits at most for
each chunk posted before it (MFS 4.5)."""

FIRST_BYTES_PER_S = 125e6
"""Bandwidth of a source before its first chunk. ASSUMPTION: no network on which moving KV pays is slower than 1 Gbit/s;
on a faster one only the first read has too many chunks."""

LEARNED_SHARE = 0.3
"""Weight of a chunk's bandwidth in the moving average."""

FLOOR_BYTES_PER_S = 50e6
"""Bandwidth below which a read counts as stuck. ASSUMPTION: no network on which moving KV pays is slower."""


def chunk_bytes(bytes_per_s: float | None) -> float:
    """Returns the size of a chunk from a source of this bandwidth; None: no chunk has come from it yet."""
    return CHUNK_S * (FIRST_BYTES_PER_S if bytes_per_s is None else bytes_per_s)


def learned(bytes_per_s: float | None, seen: float) -> float:
    """Returns the bandwidth of a source after a chunk that came with `seen` bytes per second."""
    return seen if bytes_per_s is None else bytes_per_s + LEARNED_SHARE * (seen - bytes_per_s)
