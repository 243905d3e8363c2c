"""Measure what only a GPU can show, one JSON line per fact: `python -m tools.gpu_day PART`."""
