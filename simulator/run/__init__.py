"""One simulated run: performs the coordinator's actions in simulated seconds.

May import engine, workload, costs, catalogue and stats, and no config; imported by `assembly` and
the rooms above it.
"""
