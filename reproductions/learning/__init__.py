"""What staleness does to learning: studies of co-simulated runs, and what is said of them."""
