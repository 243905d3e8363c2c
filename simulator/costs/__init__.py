"""Seconds, bytes and dollars of one piece of work.

May import catalogue, config and stats; imported by `engine` and the rooms above it.
"""
