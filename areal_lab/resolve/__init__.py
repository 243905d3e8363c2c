"""Check that a config can run on this machine, before any process starts."""
