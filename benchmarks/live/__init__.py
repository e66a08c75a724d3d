"""Load against running servers, over HTTP only: servers are started as processes of their own and never imported.

python -m benchmarks.live.overhead     what Sluice adds to an engine: latency, requests/s, CPU, memory
python -m benchmarks.live.coldstart    how long it takes to start, phase by phase, and what the tree then holds
"""
