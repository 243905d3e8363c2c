"""Assemble a `System` from a config: check the config, build the parts, simulate.

May import run and the rooms below it; imported by `report`, `plan` and `calibrate`.
"""
