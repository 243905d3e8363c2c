"""A model folder: find it, convert it, read its facts.

May import host; imported by `training`, `engines`, `preflight`, `pipeline` and `cli`.
"""
