"""Training on fixed data, without engines: SFT, reward models, DPO.

May import pipeline (progress, files of a run), preflight, training and the rooms below; imported by
`cli` and `articles`.
"""
