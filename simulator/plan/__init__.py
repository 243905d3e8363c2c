"""Find the cluster to rent: search over candidates, and report the result.

May import every room of the simulator but `calibrate`; imported by the command line.
"""
