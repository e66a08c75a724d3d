"""Sluice's KV connector: vLLM's NIXL pull connector with leases that can be given back, checked, and accounted.

Here are the names under which it and the engine that owns it talk, in request parameters and in stats. The engine's own
process reads them without vLLM's connector modules.
"""

RELEASE = "sluice_release"
"""In `kv_transfer_params`: ids of requests whose leases are to be given back."""

LEASE = "sluice_lease"
"""In `kv_transfer_params`: slot, generation and table addresses of a lease."""

TRANSFERS = "sluice_transfers"
"""In stats: [request id, ok, bytes, seconds, descriptors, held seconds] of each transfer."""

ENDED = "sluice_leases_ended"
"""In stats: ids of requests whose leases have ended."""

HELLO = "sluice_hello"
"""In stats: [compatibility hash, bytes of a KV block, Unix times of process, imports, load] of each worker."""
