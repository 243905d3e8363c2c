"""Gateways in front of a model's engines: serving of sessions, and access to them.

May import what `agents` may; imported by its workflow `agent`, by `pipeline.gateway` and by the
command `areal-lab gateway`.
"""
