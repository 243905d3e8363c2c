"""Can this config run on this machine? Every problem before a process starts."""
