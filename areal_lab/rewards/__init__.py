"""Rewards: reward functions, the service that runs them in processes, a sandbox for model code.

May import data, config and host; imported by `pipeline` and by users.
"""
