"""Run Python programs of a model: contained, limited in time, memory, files and output.

    Sandbox.run --request--> keeper --> init, process 1 of the cell --> the program
                <--reply----   '- watches: time, memory and processes of the cell, output

The keeper is the supervisor of one call; a cell is a sandboxed program with its init. `run` has the
calls, `levels` tests what works on this machine. `keeper`, `cell`, `confine` and `kernel` run in
the sandbox's own processes, and import only fast modules. Nothing from them is unpickled, and no
file is opened by its name. May import `host`; imported by rewards, agents' tools, `resolve` and
`cli`. The threats it protects against: docs/sandbox.md.
"""
