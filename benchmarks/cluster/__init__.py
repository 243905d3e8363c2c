"""Several machines, measured on one: how long moving data takes, and what it costs."""
