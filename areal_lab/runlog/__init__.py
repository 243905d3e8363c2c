"""The log of a run, real or simulated: written, read back, and analyzed.

May import control, metrics, config, data and host; imported by `plots`, `pipeline`, `cli` and
`simulator`.
"""
