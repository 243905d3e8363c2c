"""Workloads: response lengths, latencies of rewards and tools, and failures.

May import config and `areal_lab.runlog`; imported by `run`, `assembly` and the rooms above.
"""
