"""Gradients of old samples, one by one: bias and variance against the on-policy gradient."""
