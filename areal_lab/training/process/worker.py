"""The trainer process: `python -m areal_lab.training.process.worker --pipe WHERE --settings JSON`.

Reads pickled records of `areal_lab.training.protocol` from its pipes and replies to them;
log lines go to standard error. Any error is sent as `TrainerFailed`, and the process exits with 1.
SIGTERM ends it immediately, and so does the end of its parent.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from areal_lab.host.durable import with_type
from areal_lab.host.pipes import open_pipe
from areal_lab.host.processes import heavy_imports, log_exception, watch_parent
from areal_lab.training.protocol import TrainerFailed

LINGER_S = 5.0
"""Longest wait for the pipeline to react to a failure before the process ends."""


def main() -> int:
    """Parse the command line, serve, and report errors. Returns the exit code."""
    watcher = watch_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="trainer process of areal_lab")
    parser.add_argument(
        "--pipe",
        action="append",
        required=True,
        help="to the pipeline (host.pipes.open_pipe); a second one is for weights sent from memory,"
        " a third one for checkpoints written meanwhile",
    )
    parser.add_argument("--rank", type=int, default=0, help="number among the trainer's processes")
    parser.add_argument("--settings", required=True, help="TrainerSettings as JSON")
    arguments = parser.parse_args()
    pipe, push_pipe, save_pipe, *_ = [*map(open_pipe, arguments.pipe), None, None]
    assert pipe is not None, "required"
    try:
        # Imported here so that a broken torch is reported like any other error.
        with heavy_imports():
            from areal_lab.training.process.serve import serve

        code, pipeline_lives = (
            0,
            serve(pipe, push_pipe, arguments.settings, arguments.rank, save_pipe),
        )
    except Exception as error:
        # The only broad except here: any error is reported to the pipeline.
        log_exception()
        where = f"trainer rank {arguments.rank}: " if arguments.rank else ""
        message = f"{where}{with_type(error)}{remedy(error)}"
        failure = TrainerFailed(message, traceback.format_exc())
        code, pipeline_lives = 1, _report(pipe, failure)
    if watcher is not None and not pipeline_lives:
        watcher.join()  # the watcher removes the weights and ends this process
    return code


def out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out. torch has a type for this on GPUs, but none on CPUs."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def remedy(error: Exception) -> str:
    """Settings to change if memory ran out."""
    if not out_of_memory(error):
        return ""
    return (
        "\nThe trainer ran out of memory. Lower actor.max_tokens_per_mb, or set "
        "actor.gradient_checkpointing=true or actor.use_lora=true; areal-lab doctor --config FILE "
        "estimates what each part takes"
    )


def _report(pipe: Connection, failure: TrainerFailed) -> bool:
    """Send a failure; return whether the pipeline still exists."""
    try:
        pipe.send(failure)
        # Let the pipeline read this before it notices that the process ended.
        pipe.poll(LINGER_S)
    except OSError:
        print("the pipeline is gone; the failure cannot be reported", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
