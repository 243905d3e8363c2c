"""Named trainers: their speeds, structure, sources and errors.

May import the modules of `costs` that describe a trainer's speed; not `training`.
"""
