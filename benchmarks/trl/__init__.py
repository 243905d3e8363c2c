"""Benchmark of the demo against TRL: `python -m benchmarks.trl`."""
