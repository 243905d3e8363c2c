"""Write checkpoints in a thread beside the training thread, one at a time.

    training thread   SaveRequest: copy ----> Copied    step     step
    this thread                       write, rename ---------------------> Saved

Where there are several ranks, each of them has such a thread, and they agree in a group of their
own: the training threads use theirs meanwhile.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from torch.distributed import ProcessGroup

from areal_lab.control.events import Version
from areal_lab.training.parallel.group import waiting_at_most
from areal_lab.training.process.output import PreparedSave
from areal_lab.training.protocol import Saved, Span, TrainerFailed
from areal_lab.training.ranks import Ranks


@dataclass(slots=True, kw_only=True)
class BackgroundSaves:
    """The thread that writes, if one does."""

    ranks: Ranks
    pipe: Connection | None
    """Where `Saved` is sent; the first rank's only."""
    group: ProcessGroup | None
    """Of these threads; None for a single rank."""
    timeout_s: float
    """Longest wait for the others."""
    _thread: threading.Thread | None = field(default=None)

    def start(self, prepared: PreparedSave, version: Version) -> None:
        """Begin to write; the one before must be done."""
        self.wait()
        self._thread = threading.Thread(
            target=self._write,
            args=(prepared, version),
            name=f"save version {version}",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, prepared: PreparedSave, version: Version) -> None:
        start_s, path = time.time(), prepared.request.path
        reply: Saved | TrainerFailed
        try:
            with waiting_at_most(self.timeout_s) if self.group is not None else nullcontext():
                prepared.write(self.ranks, self.group)
            reply = Saved(path, version, Span("save", start_s, time.time()))
        except Exception as error:  # as in `worker`: any error is reported to the pipeline
            traceback.print_exc()
            what = f"checkpoint {path} was not written: {type(error).__name__}: {error}"
            reply = TrainerFailed(what, traceback.format_exc())
        if self.pipe is not None:
            try:
                self.pipe.send(reply)
            except OSError:
                print("the pipeline is gone; the end of a save is not told", file=sys.stderr)
