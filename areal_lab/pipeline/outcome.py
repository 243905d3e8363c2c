"""The content of summary.json, however a run ended: what is known by then, null for the rest.

SummaryInputs + events.jsonl --summary_so_far--> the fields of a run that finished
                             --write_failure---> the same fields, the error, the saved version
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import TrainStepDone
from areal_lab.pipeline.evaluate import HeldOutReward
from areal_lab.pipeline.performer import RunPerformer
from areal_lab.pipeline.resume.positions import step_of
from areal_lab.pipeline.resume.retention import measurements
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.preflight.allocation import engine_plan
from areal_lab.preflight.limits import Threads, limits_of
from areal_lab.runlog.alarm_log import AlarmLog
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.incidents import COUNTED
from areal_lab.runlog.records import Log, RunHeader
from areal_lab.runlog.replay import limits_to_fields
from areal_lab.runlog.summary import build_summary, counted
from areal_lab.training.protocol import RunningTrainer


@dataclass(slots=True)
class SummaryInputs:
    """What summary.json is made from; filled in while the run continues."""

    threads: Threads | None = None
    trainer: RunningTrainer | None = None
    servers: ServerPool | None = None
    performer: RunPerformer | None = None
    alarms: AlarmLog | None = None
    before: HeldOutReward | None = None
    """Held-out rewards before training."""
    after: HeldOutReward | None = None


def summary_so_far(
    inputs: SummaryInputs, config: TrainConfig, log: Log, *, wall_s: float
) -> dict[str, Any]:
    """The object of summary.json; null where nothing is known.

    Args:
        log: of the run, possibly incomplete.
        wall_s: from the command until now.
    """
    servers, performer, threads = inputs.servers, inputs.performer, inputs.threads
    before, after = inputs.before, inputs.after
    return build_summary(
        log,
        reward_before=before.problem_means if before else None,
        reward_after=after.problem_means if after else None,
        wall_s=wall_s,
        backend=(servers.backend if servers else "") or engine_plan(config).backend,
        more={
            "engine_version": (servers.engine_version if servers else "") or None,
            "seed": config.seed,
            "model": config.actor.path,
            "compute_dtype": inputs.trainer.ready.compute_dtype if inputs.trainer else None,
            "threads": {"trainer": threads.trainer, "engine": threads.engine} if threads else None,
            "alarms": inputs.alarms.summary() if inputs.alarms else None,
            "rewards": performer.rollout.rewards.counts if performer else None,
            "workflow": performer.rollout.counts if performer else None,
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
    """The measurement of the checkpoint that `best` leads to; None if there is none."""
    checkpoint = folder.path / "best"
    if not checkpoint.is_dir():
        return None
    measured = measurements(folder).get(step_of(checkpoint.resolve()))
    return None if measured is None else asdict(measured)


def write_failure(
    error: BaseException,
    folder: RunFolder,
    config: TrainConfig,
    inputs: SummaryInputs,
    *,
    wall_s: float,
    note: Callable[[str], None],
) -> None:
    """Write summary.json of a run that `error` ended.

    The caller raises `error` next, so a failure here is noted and does not replace it.
    """
    try:
        summary = _summary_of_failed_run(folder, config, inputs, wall_s=wall_s)
        # A second Ctrl-C cancels: not a failure, and earlier checkpoints stay.
        cancelled = isinstance(error, asyncio.CancelledError)
        summary["status"] = "stopped at once" if cancelled else "failed"
        summary["error"] = str(error) or type(error).__name__
        summary["saved_version"] = inputs.performer.last_checkpoint if inputs.performer else None
        folder.write_json("summary.json", summary)
    except Exception as problem:
        note(f"summary.json was not written: {str(problem) or type(problem).__name__}")


def _summary_of_failed_run(
    folder: RunFolder, config: TrainConfig, inputs: SummaryInputs, *, wall_s: float
) -> dict[str, Any]:
    """The summary from the log, if it can be read, and from the counts since its last step."""
    header = RunHeader(
        mode="train", started_at=0.0, limits=limits_to_fields(limits_of(config)), processes=()
    )
    nothing = Log(header, ())
    summary = summary_so_far(inputs, config, nothing, wall_s=wall_s)
    if folder.events.exists():  # else the run ended before it had a log
        try:
            summary = summary_so_far(inputs, config, read_log_file(folder.events), wall_s=wall_s)
        except (OSError, ValueError):  # damaged: its counts are unknown
            summary |= dict.fromkeys(counted(nothing)) | _tally_counts(inputs)
    return summary | _incidents_so_far(inputs)


def _tally_counts(inputs: SummaryInputs) -> dict[str, int]:
    """Counts that are in the log too."""
    if inputs.performer is None:
        return {}
    tally = inputs.performer.tally
    return {"generated_tokens": tally.generated_tokens, "interruptions": tally.interruptions}


def _incidents_so_far(inputs: SummaryInputs) -> dict[str, int]:
    """Counts of incidents until now; the log has them up to its last step."""
    if inputs.performer is not None:
        return inputs.performer.counts()
    counts = inputs.servers.counts if inputs.servers is not None else {}
    return {name: counts[name] for name in COUNTED if name in counts}
