"""A gateway of its own: engines, sessions, and what they sampled, written to a file; no trainer.

May import the other rooms of `pipeline`; imported by the command line.
"""
