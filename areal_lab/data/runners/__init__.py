"""Environments of others, each in a process of its own Python, and the tasks that they have.

    areal_lab  <--JSON lines over a socket-->  loop.py + standards/NAME.py, by the environment's Python

`loop` serves the socket, a file of `standards` calls one library. Both are run by their paths and
import nothing of areal_lab: the versions that an environment needs exclude ours.
"""
