"""Rollout throughput of an engine, against a prediction: `python -m benchmarks.rollout`."""
