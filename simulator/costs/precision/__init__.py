"""Numbers of an engine in fp8: bytes of weights and cache, and the speed of fp8 kernels.

May import the modules of `costs` that describe kernels; not `decode`, `prefill` or `weight_sync`.
"""
