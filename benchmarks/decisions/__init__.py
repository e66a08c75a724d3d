"""What a decision costs: `python -m benchmarks.decisions`."""
