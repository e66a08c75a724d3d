"""A timing and memory model of one inference engine; pure, so the live sim engine and the simulator can share it.

`timing` (durations), `blocks` (KV blocks with a prefix cache), `leases` (KV kept for a reader), `scheduler`
(continuous batching over them), `text` (the output). Nothing here knows a clock, a socket or a random
generator; times are arguments and results.
"""
