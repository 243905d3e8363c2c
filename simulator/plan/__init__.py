"""Which cluster to rent: the search over configurations, and how its result is told."""
