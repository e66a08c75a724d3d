"""The bytes that a prefix read will find before it at a port, from what the port's flow agent has reported (MFS 2.2).

    report   the port's flows in bands, in the policy's order (level, *key), with the bytes that have not arrived
    place    (level, *key) of a read of stage 1 of this size and relative layer index, by the policy itself
    left     a band's bytes less what has gone since the report: B(1-rho) * age, from the first band on
    ahead    sum of `left` of the bands whose (level, *key) does not come after the read's; of its own level, where
             flows share fairly: sum of min(left, flows * size)

Agent and simulator make the bands by the same code, and a read's place is what the policy says of any flow of stage 1,
so no rule of a policy stands here.

Not claimed: flows that come after the report; chunks of lower levels that are posted already, of which a port has its
window at most; and flows that another port holds up, which leave this one to the read. A band that stands for several
ranks goes before a read only if its last one does. Karuna's deadline flows count whole, although their rate leaves
others a part of the port.
"""

import math
from collections.abc import Iterable
from itertools import groupby

from policies.flow.base import FixedPorts, Flow, FlowPolicy, FlowState, Place, Stage, standing
from policies.state.views import PortBand, PortLoad

MOST_BANDS = 32
"""Most bands of a port in one report, unless its flows have more levels. ASSUMPTION: within the level of a prefix read
these steps tell well enough what goes before it.
"""

Rank = tuple[float, ...]
"""A flow's (level, *key)."""


def bands_of(flows: Iterable[tuple[Rank, int]]) -> tuple[PortBand, ...]:
    """Returns the bands of a port's flows, each of which has a rank and bytes to move. Flows of equal rank are one
    band; where there are too many ranks, neighbours within a level are. Flows without bytes are left out.
    """
    sums: dict[Rank, tuple[int, int]] = {}
    for rank, size in flows:
        if size > 0:
            number, total = sums.get(rank, (0, 0))
            sums[rank] = (number + 1, total + size)
    bands = []
    for ranks in _joined(sorted(sums)):
        level, *key = ranks[-1]
        members = [sums[rank] for rank in ranks]
        number, size = sum(n for n, _ in members), sum(total for _, total in members)
        bands.append(PortBand(int(level), tuple(key), number, size))
    return tuple(bands)


def _joined(ranks: list[Rank]) -> list[list[Rank]]:
    """Returns sorted ranks in groups of neighbours, as few as `MOST_BANDS` allows. A group has one level and, where a
    level has few of them, one first number of the key, by which MFS tells stages apart.
    """
    if len(ranks) <= MOST_BANDS:
        return [[rank] for rank in ranks]
    depth = 2 if len({rank[:2] for rank in ranks}) <= MOST_BANDS // 2 else 1
    alike = [list(group) for _, group in groupby(ranks, key=lambda rank: rank[:depth])]
    each = max(1, MOST_BANDS // len(alike))
    joined = []
    for group in alike:
        step = math.ceil(len(group) / each)
        joined += [group[at : at + step] for at in range(0, len(group), step)]
    return joined


def read_place(policy: FlowPolicy, size: int, rli: int, bytes_per_s: float) -> Place:
    """Returns where a prefix read of `size` bytes stands when it is submitted, with `rli` requests before its own, at
    ports that give `bytes_per_s`.
    """
    flow = Flow(
        flow_id="read",
        request_id="read",
        batch="read",
        stage=Stage.REUSE,
        source="lender",
        target="reader",
        size=size,
        rli=rli,
    )
    return standing(policy, FlowState(flow, 0, 0.0), FixedPorts(bytes_per_s), 0.0)


def bytes_ahead(load: PortLoad, place: Place, size: int, gone: float) -> float:
    """Returns the bytes that go before a prefix read of `size` bytes which stands at `place`, where `gone` bytes have
    left the port since the report.
    """
    ahead = 0.0
    for band in load.bands:
        left = max(0.0, band.size - gone)
        gone = max(0.0, gone - band.size)
        if place.shares and band.level == place.level:
            ahead += min(left, float(band.flows * size))
        elif (band.level, *band.key) <= (place.level, *place.key):
            ahead += left
    return ahead
