"""Times of the router's decisions: `python -m benchmarks.decisions`."""
