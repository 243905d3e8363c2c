"""Host agents started by Ray: it places them, and reports missing resources.

    run <--lines--> driver (child process) <--Ray--> one actor on each node --starts--> host agent
     '------------------------------ HTTP, as with every scheduler -------------------------'

Only `driver`, `connect` and `actor` import Ray, and only the driver process and Ray's workers load
them: Ray ends a process that is connected to it together with its node. Engines, trainer and data
do not pass through Ray.
"""
