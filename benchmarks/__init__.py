"""Benchmarks: step times beside the bound, cost per operator, fragmentation by chunk size. `python -m benchmarks`."""
