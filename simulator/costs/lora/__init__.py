"""Training of low-rank adapters beside frozen weights.

May import the catalogue, the configuration and `precision`; not `training` or `weight_sync`.
"""
