"""Problems, prompts, trajectories, batches and tokenization.

May import config and control; imported by `training`, `engines`, `rewards`, `runlog`, `preflight`
and `pipeline`.
"""
