"""Fit the simulator's costs and lengths to a recorded run, and replay that run.

May import every room of the simulator but `plan`; imported by the command line.
"""
