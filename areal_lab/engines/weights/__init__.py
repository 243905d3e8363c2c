"""Bring a version of the weights into engines; shared with the trainer."""
