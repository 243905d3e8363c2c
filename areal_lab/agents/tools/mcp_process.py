"""Run a server with a socket as its standard input and output; the server ends with our parent.

    python -m areal_lab.agents.tools.mcp_process FD COMMAND...

Its exit code or signal is that of the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from areal_lab.data.runners.loop import watch_parent

if __name__ == "__main__":
    watch_parent()
    socket = int(sys.argv[1])
    server = subprocess.Popen(sys.argv[2:], stdin=socket, stdout=socket)
    os.close(socket)  # else the client would not see the server's end of it
    code = server.wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
