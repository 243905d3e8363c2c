"""Common parts of runs in all commands: display, signals, run folder, sinks, summary, exit code.

May import live, sinks and the rooms below them; imported by pipeline, sweep, offline, cosim and the
command line, which provide the body of a run.
"""
