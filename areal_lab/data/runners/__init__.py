"""Environments of other libraries, each in a process of its own Python, and their tasks.

    areal_lab  <--JSON lines over a socket-->  loop.py + standards/of_NAME.py
                                               by the environment's Python

`loop` serves the socket, a file of `standards` calls one library. Both are run by their paths and
import nothing of areal_lab: the versions that an environment needs exclude those of areal_lab.
"""
