"""A grid of settings, each cell of it one run of a command: made, stored, tabulated, drawn.

May import plots and the rooms below it; imported by `cli`, which knows the commands.
"""
