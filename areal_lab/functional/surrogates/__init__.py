"""Surrogate objectives per token: what a ratio and an advantage contribute."""
