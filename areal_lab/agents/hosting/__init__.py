"""Gateways in front of a model's engines: how sessions are served, and who may start them.

May import the conversations, workflows and gateway of `agents`; imported by its workflow `agent`
and by `pipeline.gateway`.
"""
