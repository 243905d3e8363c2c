"""The trainer process."""
