"""A model folder: find it, convert it, read its facts."""
