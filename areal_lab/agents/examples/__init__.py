"""Agents to start from: programs that know a URL and a key, and nothing of training."""
