"""One inference server in simulated time.

May import costs, and neither config nor the coordinator; imported by `run` and `assembly`.
"""
