"""Standalone gateway without a trainer: engines, sessions, and a file of the sampled sessions.

May import the other rooms of `pipeline`; imported by the command line.
"""
