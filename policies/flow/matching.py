"""The choice of the flow that is served next: the first in order that has a slot at both of its ports.

A flow whose other port is always full when a slot is free would starve behind lower ones. Therefore the last slot of a
port where something is posted is kept for the first flow there: from flows of a lower level always, from flows of its
own level after `patience` permits. All ports keep slots by one order, so the first flow of all always gets both of its
slots and nothing waits in a circle. A port where nothing is posted is never kept, so no port is idle while a flow waits
that could use it.
"""

from policies.flow.config import ArbiterConfig
from policies.flow.ports import Held, PortState


def next_served(ports: dict[PortState, None], config: ArbiterConfig) -> Held | None:
    """Returns the flow to serve next at one of the ports, and takes ports without one out of `ports`."""
    best: Held | None = None
    for port in list(ports):
        found = first_served(port, config)
        if found is None:
            del ports[port]
        elif best is None or found.rank < best.rank:
            best = found
    return best


def first_served(port: PortState, config: ArbiterConfig) -> Held | None:
    """Returns the first flow at the port that has a slot at both of its ports, None if there is none."""
    if port.posted >= config.window or not port.waiting:
        return None

    def served(state: Held) -> bool:
        pair = state.pair
        other = pair.ingress if pair.egress is port else pair.egress
        return other.posted < config.window and not kept(other, state, config)

    best = port.first_with(served)
    return None if best is None or kept(port, best, config) else best


def kept(port: PortState, state: Held, config: ArbiterConfig) -> bool:
    """Returns whether the port's last slot is kept for another flow than this one."""
    if not port.posted or port.posted < config.window - 1:
        return False
    first = port.first()
    if first is None or first is state or first.rank > state.rank:
        return False
    return first.rank[0] < state.rank[0] or first.passed >= config.patience


def count_passed(state: Held) -> None:
    """Counts a permit to this flow with the flows that it passes: the first ones of its ports, if they go before it."""
    for port in (state.pair.egress, state.pair.ingress):
        first = port.first()
        if first is not None and first is not state and first.rank < state.rank:
            first.passed += 1
