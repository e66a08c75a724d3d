"""Sluice's KV connector: vLLM's NIXL pull connector with leases that can be given back, renewed, checked, and
counted.

This module has the keys by which the connector and the engine that owns it exchange data, in request parameters and in
stats. The engine's own process can import them without vLLM's connector modules.
"""

RELEASE = "sluice_release"
"""Key in `kv_transfer_params`: ids of the requests whose leases are to be given back."""

PROMPT = "sluice_prompt"
"""Key in `kv_transfer_params`: [number, hash] of the tokens whose KV a handle names: the prompt, and output of another
engine that was computed with it."""

BATCH = "sluice_batch"
"""Key in `kv_transfer_params`: name of the step that finished the prefill. Its requests are one batch of flows."""

DUE = "sluice_due_at_s"
"""Key in `kv_transfer_params`: time at which the KV of a decode is due, or None. It is a time of `time.monotonic`,
which the engine and its cores share because they run on one host; the wall clock may jump between receipt and read."""

ENDS = "sluice_ends_at_s"
"""Key in `kv_transfer_params`: time at which a request that reads must have ended, by the same clock as `DUE`."""

RENEW = "sluice_renew"
"""Key in `kv_transfer_params`: seconds for which leases are to last from now on, by the ids of their requests."""

LEASE = "sluice_lease"
"""Key in `kv_transfer_params`: slot, generation, node and table addresses of a lease."""

TRANSFERS = "sluice_transfers"
"""Key in stats: [request id, ok, bytes, seconds, descriptors, held seconds, whether checksums differed, why a part was
read without a permit ("")] of each transfer."""

ENDED = "sluice_leases_ended"
"""Key in stats: ids of the requests whose leases have ended."""

RENEWED = "sluice_leases_renewed"
"""Key in stats: ids of the requests whose leases a worker has renewed."""

HELLO = "sluice_hello"
"""Key in stats: [compatibility hash, bytes of a KV block, Unix times of process, imports, load] of each worker."""

READING = "sluice_reading"
"""Key in stats: ids of the requests that have their blocks, so that the read of their KV begins."""

OVERDUE = "sluice_overdue"
"""Key in stats: ids of the requests whose reads take longer than allowed."""

LISTENER = "sluice_listener"
"""Key in stats: [messages refused, sockets opened again] of the side channel since the last report."""
