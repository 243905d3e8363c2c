"""The host agent: one small process on each host of a run."""
