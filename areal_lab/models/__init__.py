"""Model folders: find, convert, check and verify them, read their facts; names of checkpoints.

May import control and host; imported by all rooms above it.
"""
