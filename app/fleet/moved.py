"""The counters of KV that has moved between engines, by network tier and by pair of nodes. Ingresses count, and the
dashboard reads the figures that it gets from them.
"""

TIER_TRANSFERS = "sluice_kv_tier_transfers_total"
TIER_BYTES = "sluice_kv_tier_transfer_bytes_total"
PAIR_TRANSFERS = "sluice_kv_pair_transfers_total"
PAIR_BYTES = "sluice_kv_pair_transfer_bytes_total"

TIER = ("tier",)
"""The label of a tier, from 0 to 3."""
PAIR = ("source", "target")
"""The labels of a pair of nodes: KV moves from `source` to `target`."""
MOST_PAIRS = 64
"""Most pairs of nodes that an ingress counts by their names. ASSUMPTION: 8 prefill and 8 decode nodes, or as many as a
page shows; each pair is two series of every replica."""
OTHER = "other"
"""Both nodes of the pairs beyond that number, and of those whose nodes are not known."""
UNKNOWN = "unknown"
"""The tier of transfers of which no tier is known."""
