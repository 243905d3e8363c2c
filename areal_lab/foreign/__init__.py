"""Runs of other frameworks, read from their logs: recognize, parse, convert names and units.

Reads text and metric files of verl, TRL, prime-rl and others into one record (`record.py`) and
executes nothing. May import `host`; imported by `cli`. Loads no torch.
"""
