"""A grid of settings, with one run of a command per cell: run, stored, tabulated, drawn.

May import plots and the rooms below it; imported by `cli`, which knows the commands.
"""
