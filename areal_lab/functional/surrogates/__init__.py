"""Surrogate objectives per token: what a ratio and an advantage contribute.

May import the files below the rooms (ratios, masked, checks); imported by `losses`.
"""
