"""Run one training: the asyncio shell that executes the decisions of `areal_lab.control`.

May import every room of areal_lab but `cli`; imported by `cli`, `benchmarks` and `reproductions`.
"""
