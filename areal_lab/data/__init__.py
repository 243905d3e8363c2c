"""Trajectories, batches, problems and tokenization."""
