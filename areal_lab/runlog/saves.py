"""How long training waited for checkpoints.

TrainStepDone  (CheckpointDone of an earlier one)  Save  ...  CheckpointCopied | CheckpointDone
      |<------------- if it is there ------------------|<----------->|
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_lab.control.events import (
    CheckpointCopied,
    CheckpointDone,
    RunStarted,
    Save,
    TrainStepDone,
)
from areal_lab.runlog.records import ActionRecord, EventRecord, Log


def save_waits(log: Log) -> Iterator[float]:
    """Seconds of each checkpoint in which no step could begin, in order.

    One that was written beside training costs the time to copy its state, and what was left of the
    checkpoint before it.
    """
    step_done_s, earlier_done, since_s = 0.0, False, None
    for record in log.records:
        match record:
            case EventRecord(t_s=t_s, event=TrainStepDone()):
                step_done_s, earlier_done = t_s, False
            case ActionRecord(t_s=t_s, action=Save()):
                since_s = step_done_s if earlier_done else t_s
            case EventRecord(t_s=t_s, event=CheckpointCopied() | CheckpointDone() as event):
                earlier_done = isinstance(event, CheckpointDone)
                if since_s is not None:
                    yield t_s - since_s
                    since_s = None
            case EventRecord(event=RunStarted()):
                since_s = None  # of a run that was killed while it saved
            case _:
                pass
