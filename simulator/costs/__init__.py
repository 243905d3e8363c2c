"""Seconds, bytes and dollars of one piece of work, from `catalogue`."""
