"""GPUs, hosts and models, as facts with their sources; imports `stats` at most."""
