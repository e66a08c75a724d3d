"""Names under which the KV connector and the engine that owns it talk, in request parameters and in stats.

Apart from the connector, so that an engine's owner need not import vLLM's connector to read them.
"""

RELEASE = "sluice_release"  # kv_transfer_params: request ids whose leases to give back
LEASE = "sluice_lease"  # kv_transfer_params: slot, generation and table addresses of a lease

TRANSFERS = "sluice_transfers"  # stats: [request id, ok, bytes, seconds, descriptors, held seconds]
ENDED = "sluice_leases_ended"  # stats: request ids
HELLO = (
    "sluice_hello"  # stats: [compatibility hash, bytes of a KV block, Unix times of process, imports, load]
)
