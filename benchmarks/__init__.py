"""Benchmarks: `python -m benchmarks.NAME [--json] [--quick] [--repeats N]`."""
