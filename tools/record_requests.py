"""Record the run that the notebook about live runs opens: two changes of eta, a pause, a stop.

    step 30   eta 8 -> 0        the next batches are as old as before
    step 60   eta 0 -> 8
    step 90   pause, 6 s, resume
    step 110  stop

    python -m tools.record_requests                into notebooks/data/requests (2 CPU minutes)

Its log is kept, compressed, and recording.json: the command, the settings, the date, the processor.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from areal_lab.config.load import load_config
from areal_lab.host.machine import processor_name
from areal_lab.pipeline.train import train

ROOT: Final = Path(__file__).parents[1]
INTO: Final = ROOT / "notebooks" / "data" / "requests"
ETA: Final = 8.0
LOWER, RAISE, PAUSE, STOP = 30, 60, 90, 110
"""Steps after which something is asked."""
PAUSE_S: Final = 6.0
SETTINGS: Final = (
    f"eta={ETA:g}",
    "rollout.max_concurrent_rollouts=96",
    "actor.max_tokens_per_mb=24",  # makes the trainer the slower side: generation runs eta ahead
    "total_train_steps=400",
    "evaluation.max_problems=0",
    "plots=false",
)


def record(into: Path, command: str) -> None:
    """Run once, ask, and keep the log in `into`; replaces an existing folder."""
    with tempfile.TemporaryDirectory(prefix="requests-") as runs:
        run = train(load_config("tiny", [*SETTINGS, f"run_dir={runs}"])).start()
        for report in run:
            match report.step:
                case int(step) if step == LOWER:
                    run.set_eta(0)
                case int(step) if step == RAISE:
                    run.set_eta(ETA)
                case int(step) if step == PAUSE:
                    run.pause()
                    time.sleep(PAUSE_S)
                    run.resume()
                case int(step) if step == STOP:
                    run.stop()
                case _:
                    pass
        _keep(run.folder, into, command)


def _keep(folder: Path, into: Path, command: str) -> None:
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    written = (folder / "events.jsonl").read_bytes()
    # Without name and time in it, the same log gives the same file.
    (into / "events.jsonl.gz").write_bytes(gzip.compress(written, 9, mtime=0))
    about = {
        "command": command,
        "settings": ["tiny", *SETTINGS],
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor_name(),
    }
    (into / "recording.json").write_text(json.dumps(about, indent=2) + "\n")


def main() -> None:
    """Record from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.record_requests", description=__doc__)
    parser.add_argument("--into", type=Path, default=INTO, help="folder to write")
    given = parser.parse_args()
    record(given.into, shlex.join(["python", "-m", "tools.record_requests", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
