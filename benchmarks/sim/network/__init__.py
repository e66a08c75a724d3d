"""The cluster's network at flow granularity: a multi-tier fat tree whose links are shared max-min fairly.

    tier_k of a pair   0 same node, 1 same rack, 2 same pod, 3 beyond                                (NetKV III-A)
    path               NVLink | NIC up [, rack uplink [, core up, core down], rack downlink], NIC down; which NIC, which
                       aggregation switch and which core switch (ECMP) is drawn when the flow starts (NetKV VI-B)
    room of a link     C_l (1 - u_l(t)) less what higher levels take; u_l is the background's share (NetKV VI-B)
    rate of a flow     max-min within its level: each flow has a bottleneck, a full link on which no flow of its level
                       has a higher rate per weight. Level 0 is served first; a level sees only what is left above it
    duration           bytes / rate, integrated over the changes of rate, + L_tier at the end; 0 bytes: L_tier
    ideal duration     bytes / B_tier + L_tier

Modules: `topology` (config, links, routes), `paths` (ECMP), `clusters` (NetKV's), `background`, `fairshare` (rates,
incremental and exact), `flows` (bytes that a path still owes), `network` (the public `Network`), `usage` (bytes by
link), `oracle_feed` (what NetKV's oracle would say of it), `fabric` (all of it as a simulated cluster's network),
`cost` (what a flow change costs).

Approximations: rates change at once, in the instant in which a flow starts, ends or changes level; the background
yields to nobody and is not a flow; a node's NVLink is one shared link per node; the racks' own switches do not block.
Not claimed: packets, queues, loss, TCP or DCQCN ramps and their convergence, head-of-line blocking, PFC storms, hash
collisions other than those of the drawn paths, link failure while flows are on the link.
"""
