"""Measures the time that the router's decisions take: `python -m benchmarks.decisions`."""
