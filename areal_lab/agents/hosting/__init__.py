"""Gateways in front of a model's engines: how sessions are served, and who may start them.

May import what `agents` may; imported by its workflow `agent`, by `pipeline.gateway` and by the
command `areal-lab gateway`.
"""
