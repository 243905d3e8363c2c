"""One pass of a micro-batch through the layers that a training GPU holds: groups, work, exchanges.

May import the modules of `costs` that describe kernels, messages and trainers; not `training`.
"""
