"""What a run saves of itself beside the model, and how it continues after its end or a kill.

May import what the pipeline may, of the pipeline itself `rollout` and `evaluate`; imported by the
pipeline and the command line.
"""
