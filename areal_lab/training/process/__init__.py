"""The trainer's process, and how to talk to it."""
