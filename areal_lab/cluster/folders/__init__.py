"""Folders go from host to host over HTTP: models, weights of a version, checkpoints.

Imports only `engines.keys` and `host`; imported by the host agents and `cluster.files`. Loads no
torch.
"""
