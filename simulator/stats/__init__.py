"""Statistics, fitting and number formatting; knows nothing of clusters.

May import no room of the simulator; imported by all.
"""
