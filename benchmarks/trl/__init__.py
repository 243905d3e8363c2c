"""The demo against TRL: `python -m benchmarks.trl`."""
