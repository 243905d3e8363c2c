"""Assemble a `System` from a config: check the config, build the parts, simulate."""
