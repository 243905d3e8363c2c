"""Advantages and returns from rewards.

May import divergences and the files below the rooms (segments, masked, checks); imported by users
and `training`.
"""
