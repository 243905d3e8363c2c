"""What the metrics of a run mean, and which of them are alarming: tables and decisions.

Standard library only: no clock, no files. Imported by `config`, `runlog` and everything above.
"""
