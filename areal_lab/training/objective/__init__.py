"""The objective of a run: from the calls of a config to a policy loss and to advantages.

May import functional, config and data; imported by `training`, `resolve` and the command line.
"""
