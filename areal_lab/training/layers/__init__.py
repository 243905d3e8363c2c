"""How decoder layers compute: masks of attention, what is kept for the backward pass, compilation.

May import data and models; imported by `training`.
"""
