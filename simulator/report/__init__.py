"""Reports of simulation results: JSON, tables, notes and pictures.

May import assembly and the rooms below it; imported by `plan` and the command line.
"""
