"""Attention of models whose layers differ: full, with a window, or with a state.

May import the catalogue, kernels and `precision`; not `decode`, `prefill` or `training`.
"""
