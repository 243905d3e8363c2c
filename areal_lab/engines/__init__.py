"""Inference engines: their interface, a client, a small server, and the transfer of weights.

May import models, host, data and control; imported by `pipeline`, `resolve` and `cli`. `training`
may import `protocol` and `weights` only.
"""
