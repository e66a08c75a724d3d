"""NetKV's network cost oracle, measured on a simulated network. It gives the scheduler these facts (NetKV III-E):

    tier_map        -> Oracle.places (rack and pod of every node)
    tier_bandwidth  -> B_tau, tier_latency -> L_tau: the topology's
    congestion      -> 1 - c_tau = min over the link classes k on the tier's paths of C_k (1 - u_k) / B_tau, at most 1,
                       with u_k the mean share over the links of class k: the tier's aggregate, blind to single links,
                       as the paper has it. With the same u on all links, c_tau = u.

u is the share of background traffic. Without `own_flows_excluded` the share of the simulated flows is added. The oracle
carries that flag, so that the policies then leave out their own count of flows (NetKV III-D).
"""

from collections.abc import Mapping

from benchmarks.sim.network.network import Network
from benchmarks.sim.network.topology import TIER_CLASSES
from policies.network.oracle import Oracle

# ASSUMPTION: the largest congestion that is reported; an oracle's congestion must be below 1.
_FULL = 0.999


def measured_oracle(
    network: Network,
    now_s: float,
    refresh_s: float,
    own_flows_excluded: bool = True,
    uplinks: Mapping[int, int] | None = None,
) -> Oracle:
    """Returns the oracle that an operator measures at `now_s`, the kernel's time, and refreshes every `refresh_s`.

    `uplinks` None reports no uplinks, as in NetKV.
    """
    topology = network.topology
    return Oracle(
        bandwidth_bytes_per_s=topology.tier_bytes_per_s,
        latency_s=topology.tier_latency_s,
        places=topology.places,
        congestion=congestion(network, own_flows_excluded),
        congestion_at_s=now_s,
        stale_after_s=max(60.0, 2.0 * refresh_s),
        own_flows_excluded=own_flows_excluded,
        uplinks=uplinks or {},
    )


def congestion(network: Network, own_flows_excluded: bool = True) -> dict[int, float]:
    """Returns the present congestion c_tau by tier, from 0 to below 1."""
    topology = network.topology
    shares = network.background_shares()
    if not own_flows_excluded:
        shares = [a + b for a, b in zip(shares, network.own_shares(), strict=True)]
    by_class: dict[str, list[float]] = {}
    for link in topology.links:
        by_class.setdefault(link.kind, []).append(shares[link.index])
    free = {
        kind: topology.class_bytes_per_s[kind] * (1.0 - sum(values) / len(values))
        for kind, values in by_class.items()
    }
    result = {}
    for tier, bandwidth in topology.tier_bytes_per_s.items():
        left = min(free[kind] for kind in TIER_CLASSES[tier] if kind in free) / bandwidth
        result[tier] = min(_FULL, max(0.0, 1.0 - left))
    return result
