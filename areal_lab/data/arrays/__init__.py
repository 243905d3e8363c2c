"""Trajectories as flat numpy arrays, in which they are kept and sent.

May import the rest of `data`; imported by `cluster` and `training`.
"""
