"""Environments that answer each turn of a model: their protocol, a workflow, adapters to libraries.

May import what `agents` may, and its tools and workflow; imported by `agents.catalogue`.
"""
