"""Speculative decoding: what is drafted, verified and accepted in a step.

May import the catalogue, kernels, `precision` and `attention`; not `decode`.
"""
