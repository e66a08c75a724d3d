"""Measures running servers under load, over HTTP only. Servers run as separate processes and are never imported.

python -m benchmarks.live.overhead     what Sluice adds to an engine: latency, requests/s, CPU, memory
python -m benchmarks.live.coldstart    how long it takes to start, phase by phase, and what the tree then holds
python -m benchmarks.live.scaling      fleets of sim engines that grow, drain and switch under load
python -m benchmarks.live.scaling_steps   the same of vLLM engines, and the steps of their starts
"""
