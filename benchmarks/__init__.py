"""Measurements of this project: `python -m benchmarks.NAME [--json] [--quick] [--repeats N]`."""
