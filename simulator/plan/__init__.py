"""Find the cluster to rent: search over candidates, and report the result."""
