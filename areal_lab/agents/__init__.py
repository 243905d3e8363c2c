"""Agents: conversations of many turns with tools, and whose tokens are trained on.

May import engines' protocol, rewards, data, models and config; imported by `preflight`, `pipeline`.
"""
