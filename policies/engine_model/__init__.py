"""A timing and memory model of one inference engine. It is pure, so the live sim engine and the simulator share it.

The modules are `timing` (durations), `blocks` (KV blocks with a prefix cache), `leases` (KV kept for a reader),
`scheduler` (continuous batching with these three) and `text` (the output). Nothing here uses a clock, a socket or a
random generator; times are arguments and results.
"""
