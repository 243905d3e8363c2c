"""A process that trains on fixed data: `python -m areal_lab.offline.worker --job JSON --rank R`.

Rank 0 sends the events of the run through an inherited socket, from which it also reads a request
to stop after the running step. Log lines go to standard error. The process ends with its parent.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from areal_lab.config.problem import ConfigError
from areal_lab.host.durable import with_type
from areal_lab.host.processes import heavy_imports, log_exception, watch_parent
from areal_lab.offline.job import Failed, Job, Phase, RunEvent
from areal_lab.training.process.worker import LINGER_S, out_of_memory


def main() -> int:
    """Parse the command line, train, and report errors. Returns the exit code."""
    watch_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="training process of areal_lab")
    parser.add_argument("--fd", type=int, help="inherited socket to the console (rank 0)")
    parser.add_argument("--rank", type=int, default=0, help="rank of this process")
    parser.add_argument("--job", required=True, help="Job as JSON")
    arguments = parser.parse_args()
    pipe = None
    if arguments.fd is not None:
        os.set_inheritable(arguments.fd, False)
        pipe = Connection(arguments.fd)
    stop = threading.Event()
    if pipe is not None:
        threading.Thread(target=_listen, args=(pipe, stop), name="stop", daemon=True).start()

    def emit(event: RunEvent) -> None:
        if pipe is not None:
            pipe.send(event)

    try:
        emit(Phase("loading torch and transformers"))
        # Imported here so that a broken torch is reported like any other error.
        with heavy_imports():
            from areal_lab.offline.run import run_rank

        run_rank(Job.from_json(arguments.job), arguments.rank, emit=emit, stop=stop.is_set)
    except ConfigError as error:
        print(error, file=sys.stderr)
        _fail(pipe, Failed(str(error), "", error.problems))
        return 1
    except Exception as error:
        # The only broad except here: any error is reported to the console.
        log_exception()
        message = with_type(error)
        if out_of_memory(error):
            message += (
                "\nMemory ran out. Lower actor.max_tokens_per_mb, or set "
                "actor.gradient_checkpointing=true or actor.use_lora=true"
            )
        _fail(pipe, Failed(message, traceback.format_exc()))
        return 1
    return 0


def _listen(pipe: Connection, stop: threading.Event) -> None:
    """Set the event at the first message; `watch_parent` handles the end of the parent."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        return
    stop.set()


def _fail(pipe: Connection | None, failed: Failed) -> None:
    if pipe is None:
        return
    try:
        pipe.send(failed)
        # Let the console read this before it notices that the process ended.
        pipe.poll(LINGER_S)
    except OSError:
        print("the console is gone; the failure cannot be reported", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
