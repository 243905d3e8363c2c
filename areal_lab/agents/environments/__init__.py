"""Environments that respond to each turn of a model: protocol, workflow, adapters to libraries.

May import what `agents` may, and its tools and workflow; imported by `agents.catalogue`.
"""
