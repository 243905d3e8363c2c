"""Rewards: reward functions, and the service that runs them in processes that can be killed.

May import data, config and host; imported by `pipeline` and by users.
"""
