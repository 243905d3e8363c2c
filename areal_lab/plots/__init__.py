"""Pictures of a run, real or simulated, from its event log; one picture per file.

May import runlog and control; imported by `pipeline` and `simulator`.
"""
