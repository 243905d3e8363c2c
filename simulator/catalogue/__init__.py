"""GPUs, hosts and models, as facts with their sources.

May import `areal_lab.config`; imported by every room that computes.
"""
