"""Meaning of the metrics of a run, and records of alarms on them.

Standard library only: no clock, no files. Imported by `config`, `runlog` and everything above.
"""
