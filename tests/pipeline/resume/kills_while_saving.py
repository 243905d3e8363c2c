"""A loss that kills its trainer in step 3, while the checkpoint of step 2 is complete but for its
name: that can only be if training went on while it was written."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from areal_lab.training.process import output
from tests.training.test_step import own_loss

FOLDER = "AREAL_LAB_TEST_FOLDER"
"""Variable: where a file says that the kill happened."""
_written = threading.Event()
_flush_tree = output.flush_tree


def _stay_before_the_name(folder: Path) -> None:
    _flush_tree(folder)
    if folder.name.startswith(".step-00002.writing-") and not _marker().exists():
        _written.set()
        threading.Event().wait()


def _marker() -> Path:
    return Path(os.environ[FOLDER]) / "killed"


def loss(*tensors: Any, token_count: int) -> Any:
    """REINFORCE, and a kill."""
    saving = any(thread.name == "save version 2" for thread in threading.enumerate())
    if saving and not _marker().exists():
        _written.wait()
        _marker().touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if "areal_lab.pipeline.run" not in sys.modules:  # in the trainer
        output.flush_tree = _stay_before_the_name
    return own_loss(*tensors, token_count=token_count)
