"""Agents: multi-turn conversations with tools, and the tokens of them that are trained on.

May import engines' protocol, rewards, data, models and config; imported by `resolve`, `pipeline`.
"""
