"""Run Python programs of a model: contained, limited in time, memory, files and output.

    Sandbox.run --request--> keeper --> init, process 1 of the cell --> the program
                <--reply----   '- watches: time, memory and processes of the cell, output

`run` has the calls, `levels` what works on this machine. `keeper`, `cell`, `confine` and
`kernel` run in the sandbox's own processes, and import nothing that takes long. Nothing that comes
back from them is unpickled, and no file is opened by its name. May import `host`; imported by
rewards, agents' tools, `preflight` and `cli`. What it protects against: docs/sandbox.md.
"""
