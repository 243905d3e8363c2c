"""Example agents: programs that know a URL and a key, and nothing about training."""
