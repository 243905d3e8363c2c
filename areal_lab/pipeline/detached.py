"""A run in a process of its own, which outlives the one that started it.

    start_run(config) --> run folder, process.json --> python -m areal_lab.pipeline.detached FOLDER
                      --> AttachedRun                        output: FOLDER/logs/run.log

A notebook that is restarted finds such a run again (`live_runs`), because none of its processes is
a child of the notebook's that ends with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from areal_lab.config.load import load_config
from areal_lab.config.schema import TrainConfig
from areal_lab.live.attach import OUTPUT, AttachedRun, attach_run
from areal_lab.live.mailbox import open_mailbox
from areal_lab.live.presence import new_presence, write_presence
from areal_lab.pipeline.run import prepare
from areal_lab.runlog.folder import RunFolder


def start_run(config: TrainConfig) -> AttachedRun:
    """Check a configuration, start its run in another process, and return at once.

    The run ends by itself, or with `stop`; not with this process. Its settings are all in `config`:
    a reward function or a loss is named by its import path (`train` takes functions).

    Raises:
        ConfigError: one line per problem, before any process starts.
        OSError: if the run folder cannot be made.
    """
    prepare(config)
    folder = RunFolder.create(config).path
    open_mailbox(folder)
    with (folder / OUTPUT).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C and a closed terminal do not reach it
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    write_presence(folder, new_presence(process.pid, "loading the program"))
    # Its end has to be noticed, or it stays as a zombie of this process.
    threading.Thread(target=process.wait, name=f"wait for {folder.name}", daemon=True).start()
    return attach_run(folder)


def main(folder: Path) -> int:
    """Run in this process until the end; returns the exit code."""
    from areal_lab.pipeline.console import run_to_end  # rich, which only a display needs

    return run_to_end(load_config(folder / "config.yaml", []), folder=RunFolder(folder))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
