"""Shell scripts that choose between controller and host, as a scheduler numbers its machines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

RUN_FAILED: Final = 42
"""Exit code of a controller whose run did not end well, whatever its own code was."""


def indexed_script(train: Sequence[str], host: Sequence[str]) -> str:
    """Start controller or host by `JOB_COMPLETION_INDEX`, in any POSIX shell.

    A failed run has an exit code of its own, by which Kubernetes tells it from a lost host: it must
    not be started again from the beginning. A run that was asked to end has not succeeded.
    """
    lines = [
        "#!/bin/sh",
        "# Pod 0 is the controller; the others offer their machines to it.",
        "set -eu",
        'if [ "$JOB_COMPLETION_INDEX" != 0 ]; then',
        f"  exec {shlex.join(host)}",
        "fi",
        *run_and_wait(shlex.join(train)),
        'if [ "$code" -ne 0 ]; then',
        '  echo "The run ended with exit code $code; train --resume RUN continues it." >&2',
        f"  exit {RUN_FAILED}",
        "fi",
        "",
    ]
    return "\n".join(lines)


def run_and_wait(command: str, *, process: str = '"$run"') -> Sequence[str]:
    """Lines that run a command to its end and put its exit code into `code`, in any POSIX shell.

    SIGTERM asks the run to end, once: it then finishes its step and saves, and a second request
    would end it at once. One that comes before the run was started is kept until then.

    Args:
        command: in shell syntax.
        process: the process to ask, in shell syntax, if it is not the command's own.
    """
    return [
        "run='' asked='' passed_on=''",
        "stop() {",
        "  asked=1 signaled=1",
        '  if [ -n "$run" ] && [ -z "$passed_on" ]; then',
        "    passed_on=1",
        f"    kill -TERM {process} 2> /dev/null || true",
        "  fi",
        "}",
        "trap stop TERM INT",
        f"{command} &",
        "run=$!",
        '[ -z "$asked" ] || stop',
        "# A signal ends `wait`, but not the run; 127 is a run that was waited for before.",
        "code=127",
        "while :; do",
        "  signaled='' ended=0",
        '  wait "$run" || ended=$?',
        '  [ "$ended" = 127 ] || code=$ended',
        '  [ -n "$signaled" ] || break',
        "done",
    ]


def ranked_script(train: Sequence[str], host: Sequence[str]) -> str:
    """Start controller or host by `SKYPILOT_NODE_RANK`, in bash.

    Args:
        host: its last word is `HOST:PORT`, of which the host is replaced by the first machine's.
    """
    *words, address = host
    port = address.rpartition(":")[2]
    return f"""\
set -euo pipefail
export PATH="$HOME/areal_lab/bin:$PATH"
if [ "$SKYPILOT_NODE_RANK" = 0 ]; then
  exec {shlex.join(train)}
fi
controller=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")
exec {shlex.join(words)} "$controller:{port}"
"""
