"""Problems, prompts, trajectories, batches and tokenization.

May import config, control and models; imported by `training`, `engines`, `rewards`, `runlog`,
`resolve` and `pipeline`.
"""
