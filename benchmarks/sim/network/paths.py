"""The choice of a flow's path when it starts: its NICs and, between racks, one route of the ECMP group."""

import random

from benchmarks.sim.network.topology import NVLINK, Node, Topology, TopologyError


def draw_path(
    topology: Topology,
    here: Node,
    there: Node,
    source_nic: int | None,
    target_nic: int | None,
    rng: random.Random,
) -> tuple[int, ...]:
    """Draws a path that avoids missing links, and returns its link indices from node `here` to node `there`.

    NICs that are not given are drawn. Raises TopologyError when no path connects the two, or a given NIC is missing.
    """
    if here.name == there.name:
        if here.nvlink is None:
            raise TopologyError(f"no path from {here.name} to itself: {here.name}/{NVLINK} is missing")
        return (here.nvlink,)
    up = _draw_nic(here, "up", here.nics_up, source_nic, rng)
    down = _draw_nic(there, "down", there.nics_down, target_nic, rng)
    routes = topology.fabric_routes(here, there)
    if not routes:
        missing = sorted(topology.missing)
        raise TopologyError(
            f"no path from {here.name} to {there.name}: missing_links cut them off: {missing}"
        )
    route = routes[0] if len(routes) == 1 else routes[rng.randrange(len(routes))]
    return (up, *route, down)


def _draw_nic(
    node: Node, way: str, nics: tuple[int | None, ...], wanted: int | None, rng: random.Random
) -> int:
    if wanted is not None:
        if not 0 <= wanted < len(nics):
            raise TopologyError(f"{node.name} has no nic{wanted}: its NICs are 0 to {len(nics) - 1}")
        link = nics[wanted]
        if link is None:
            raise TopologyError(f"no path over {node.name}/nic{wanted}/{way}: that link is in missing_links")
        return link
    present = [link for link in nics if link is not None]
    if not present:
        raise TopologyError(f"no path over {node.name}: all its NIC links {way} are in missing_links")
    return present[0] if len(present) == 1 else present[rng.randrange(len(present))]
