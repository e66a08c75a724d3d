"""The configuration of an arbiter."""

from dataclasses import dataclass
from typing import Annotated

from policies.routing.params import Flag, Number, Whole, check


@dataclass(frozen=True, slots=True)
class ArbiterConfig:
    """Sizes of permits, and what is assumed of a port until its bandwidth is learned."""

    window: Annotated[int, Whole(1, 64, "chunks")] = 2
    """Chunks that may be posted at a port at once; a whole read counts as one. From 2 on, a port works while the next
    permit is on its way.
    """
    chunk_s: Annotated[float, Number(above=0.0, unit="s")] = 0.010
    """Time that a chunk should take at the learned bandwidth of the slower of its two ports, beside the time of its
    messages, for which it is larger.
    """
    least_chunk_bytes: Annotated[int, Whole(1, unit="bytes")] = 65_536
    """Least size of a chunk, unless less is left."""
    whole_read_when_alone: Annotated[bool, Flag()] = True
    """Whether one permit covers all that is left of a flow while its ports have no other flow, waiting or posted."""
    whole_at_most_s: Annotated[float, Number(above=0.0, unit="s")] | None = 0.030
    """Most that such permits may cover, in seconds at the learned bandwidth; null: any. A flow that comes next waits
    for what is posted. By default it is three chunks' time, so that a read alone needs a third of the messages.
    """
    port_bytes_per_s: Annotated[float, Number(above=0.0, unit="bytes/s")] = 1.25e9
    """Bandwidth of a port until it is learned or named by an event."""
    learn: Annotated[bool, Flag()] = True
    """Whether ports learn B(1-rho) from their chunks; else their nominal bandwidth counts."""
    learn_chunks: Annotated[int, Whole(2, 4096, "chunks")] = 32
    """Latest chunks of a port from which its bandwidth is learned."""
    patience: Annotated[int, Whole(1, 1_000_000, "permits")] = 4
    """Permits to flows of the same level that may pass the first flow of a port while its other port is full; then the
    port's last slot is kept for it. A flow of a lower level never takes the last slot before it.
    """
    late_s: Annotated[float, Number(above=0.0, unit="s")] = 1.0
    """Time after which a posted chunk of which nothing has arrived is late, if that is more than four times what it
    should take at the learned bandwidth, which it shares with what is posted beside it. A late chunk takes no slot of
    its ports, so that a lender or a reader that stands still does not stop others; no further chunk is permitted
    between its two engines until it has arrived. Where eight windows of a port's chunks are late already, a further
    one keeps its slot. ASSUMPTION: a process that works is not kept from a core for as long.
    """
    most_flows: Annotated[int, Whole(1, unit="flows")] = 65_536
    """Most flows that are held at once; more are refused."""

    def __post_init__(self) -> None:
        check(self, "flow arbiter")
