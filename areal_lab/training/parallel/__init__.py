"""Several processes that train one model: their mesh, shards and collectives.

May import `training.ranks` and `training.forward`; imported by `training.process`, which gives a
learner the functions of a `Ranks`.
"""
