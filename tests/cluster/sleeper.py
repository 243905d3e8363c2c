"""A child process that does nothing until its parent ends."""

import signal

from areal_lab.host.processes import watch_parent

watch_parent()
print("sleeping", flush=True)
signal.pause()
