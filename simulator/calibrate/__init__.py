"""Fit the simulator's costs and lengths to a recorded run, and replay that run."""
