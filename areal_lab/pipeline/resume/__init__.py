"""State that a run saves with its model, and continuation of a run after its end or a kill.

May import what the pipeline may, and `rollout` and `evaluate` of the pipeline; imported by the
pipeline and the command line.
"""
