"""Co-simulation: a real model generates and learns under the schedule of a simulated cluster.

May import `areal_lab` and `simulator`, which do not know it; only `areal_lab.cli` imports it.
"""
