"""Tools that a model may call: arithmetic, search, Python, your own; and the limits of their calls.

May import config, host and rewards; imported by `agents`.
"""
