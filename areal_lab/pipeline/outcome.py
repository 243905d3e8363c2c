"""Content of summary.json, also of a run that an error ended; unknown fields are null.

SummaryInputs + events.jsonl --summary_so_far--> the fields of a run that finished
                             --summary_of_failure--> the same fields, and the saved version
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal_lab.control.events import TrainStepDone
from areal_lab.models.checkpoint_files import step_of
from areal_lab.pipeline.performer import RunPerformer
from areal_lab.pipeline.resume.checkpoints import measurements
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.resolve.limits import Threads
from areal_lab.resolve.resolved import Resolved
from areal_lab.runlog.alarm_log import AlarmLog
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.held_out import HeldOutReward
from areal_lab.runlog.incidents import COUNTED
from areal_lab.runlog.records import Log, RunHeader
from areal_lab.runlog.replay import limits_to_fields
from areal_lab.runlog.summary import build_summary, counted
from areal_lab.training.protocol import RunningTrainer


@dataclass(slots=True)
class SummaryInputs:
    """Parts of a run from which summary.json is made; set during the run."""

    threads: Threads | None = None
    trainer: RunningTrainer | None = None
    servers: ServerPool | None = None
    performer: RunPerformer | None = None
    alarms: AlarmLog | None = None
    before: HeldOutReward | None = None
    """Held-out rewards before training."""
    after: HeldOutReward | None = None


def summary_so_far(
    inputs: SummaryInputs, resolved: Resolved, log: Log, *, wall_s: float
) -> dict[str, Any]:
    """Return the content of summary.json; unknown fields are null.

    Args:
        inputs: the parts of the run that exist.
        resolved: the checked configuration.
        log: log of the run, possibly incomplete.
        wall_s: seconds since the start of the command.
    """
    servers, performer, threads = inputs.servers, inputs.performer, inputs.threads
    before, after = inputs.before, inputs.after
    return build_summary(
        log,
        reward_before=before.problem_means if before else None,
        reward_after=after.problem_means if after else None,
        wall_s=wall_s,
        backend=(servers.backend if servers else "") or resolved.engines.backend,
        more={
            "engine_version": (servers.engine_version if servers else "") or None,
            "seed": resolved.config.seed,
            "model": resolved.config.actor.path,
            "compute_dtype": inputs.trainer.ready.compute_dtype if inputs.trainer else None,
            "threads": {"trainer": threads.trainer, "engine": threads.engine} if threads else None,
            "alarms": inputs.alarms.summary() if inputs.alarms else None,
            "rewards": performer.rollout.rewards.counts if performer else None,
            "workflow": performer.rollout.counts if performer else None,
            "environment": (performer.environment or None) if performer else None,
            "evaluations": _evaluations(performer, log) if performer else None,
            "best": _best(performer.folder) if performer else None,
            "held_out_unjudged": {
                "before": before.unscored if before else None,
                "after": after.unscored if after else None,
            },
        },
    )


def _evaluations(performer: RunPerformer, log: Log) -> dict[str, object]:
    trained = max(
        (r.event.version for r in log.events if isinstance(r.event, TrainStepDone)), default=0
    )
    return performer.evaluations.summary(trained)


def _best(folder: RunFolder) -> dict[str, object] | None:
    """Return the measurement of the checkpoint of the link `best`; None without one."""
    checkpoint = folder.path / "best"
    if not checkpoint.is_dir():
        return None
    step = step_of(checkpoint.resolve().name)
    measured = None if step is None else measurements(folder).get(step)
    return None if measured is None else asdict(measured)


def summary_of_failure(
    folder: Path, resolved: Resolved, inputs: SummaryInputs, *, wall_s: float
) -> dict[str, Any]:
    """Return the summary of a run that an error ended.

    It is made from the log, if that can be read, and from the counts since the last step.
    """
    header = RunHeader(
        mode="train", started_at=0.0, limits=limits_to_fields(resolved.limits), processes=()
    )
    nothing, events = Log(header, ()), RunFolder(folder).events
    summary = summary_so_far(inputs, resolved, nothing, wall_s=wall_s)
    if events.exists():  # else the run ended before it had a log
        try:
            summary = summary_so_far(inputs, resolved, read_log_file(events), wall_s=wall_s)
        except (OSError, ValueError):  # damaged: its counts are unknown
            summary |= dict.fromkeys(counted(nothing)) | _tally_counts(inputs)
    saved = inputs.performer.last_checkpoint if inputs.performer else None
    return {**summary, **_incidents_so_far(inputs), "saved_version": saved}


def _tally_counts(inputs: SummaryInputs) -> dict[str, int]:
    """Return the counts of the display, which replace those of a damaged log."""
    if inputs.performer is None:
        return {}
    tally = inputs.performer.tally
    return {"generated_tokens": tally.generated_tokens, "interruptions": tally.interruptions}


def _incidents_so_far(inputs: SummaryInputs) -> dict[str, int]:
    """Return the counts of incidents until now, which the log has only up to its last step."""
    if inputs.performer is not None:
        return inputs.performer.counts()
    counts = inputs.servers.counts if inputs.servers is not None else {}
    return {name: counts[name] for name in COUNTED if name in counts}
