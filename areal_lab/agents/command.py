"""Run a server's command, which ends with our parent.

    python -m areal_lab.agents.command FD COMMAND...

FD is a socket that becomes the standard input and output of the command; `-` leaves them. The exit
code or signal is that of the command, which has the time of `Child.stop` to end after a SIGTERM.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

from areal_lab.data.runners.loop import watch_parent


def attended(command: Sequence[str], descriptor: int | None = None) -> list[str]:
    """Command of a child process that runs a server's command."""
    socket = "-" if descriptor is None else str(descriptor)
    return [sys.executable, "-m", "areal_lab.agents.command", socket, *command]


def check_command(what: str, command: Sequence[str]) -> None:
    """Check the setting of a server's command.

    Raises:
        ValueError: in one line.
    """
    if isinstance(command, str) or not command or not all(isinstance(w, str) for w in command):
        raise ValueError(
            f"{what}: command is {command!r:.80}, but must be a list: the server's program and its "
            "arguments"
        )
    if shutil.which(command[0]) is None:
        raise ValueError(f"{what}: command is {command[0]!r}, which is no program here")


def _main(descriptor: str, *command: str) -> int:
    watch_parent()
    if descriptor == "-":
        server = subprocess.Popen(command)
    else:
        server = subprocess.Popen(command, stdin=int(descriptor), stdout=int(descriptor))
        os.close(int(descriptor))  # else the client would not see the server's end of it
    signal.signal(signal.SIGTERM, lambda *_: None)  # the command has it, too
    code = server.wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
