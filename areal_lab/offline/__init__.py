"""Training on fixed data without engines: SFT, reward models and DPO.

May import pipeline (progress, files of a run), resolve, training and the rooms below; imported by
`cli` and `articles`.
"""
