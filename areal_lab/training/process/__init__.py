"""The trainer's process: a client that starts it and calls it, and the worker that it runs.

May import `training`, `engines.weights` and host; imported by `pipeline`.
"""
