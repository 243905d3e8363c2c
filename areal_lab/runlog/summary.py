"""summary.json: the settings and results of a run in one object, for scripts.

Everything except the held-out rewards, the wall time and the memory is counted from the event log,
so the summary, the pictures and `areal-lab trace` agree. Infinity, as in `eta`, is the string
"inf"; values that were not measured are null.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from areal_lab.control import events as ev
from areal_lab.control.ledger import LagCounts, Ledger, mean_lag
from areal_lab.runlog.activity import ProcessUse, idle_by_cause, training_window
from areal_lab.runlog.incidents import incidents, pauses
from areal_lab.runlog.intervals import mean_interval
from areal_lab.runlog.lags import TrainedBatch, ledger_of, total, trained_batches
from areal_lab.runlog.records import (
    IMPORTED,
    TRAINER,
    ActionRecord,
    EventRecord,
    Log,
    MetricRecord,
    finite_json,
    whole,
)
from areal_lab.runlog.replay import eta_changes

PEAK_MEMORY = "peak_rss_bytes"
"""Metric of the largest resident memory of a process and its descendants, an upper bound of
their memory at one time (`host.memory.group_peak_rss_bytes`)."""


TRAINER_SPEED = (
    "trainer_tokens_per_s",
    "trainer_tflop_per_s",
    "mfu",
    "gpu_peak_allocated_bytes",
    "gpu_peak_reserved_bytes",
)
"""Metrics of the trainer that the log has for each step, where they are known."""


def build_summary(
    log: Log,
    *,
    reward_before: Sequence[float] | None,
    reward_after: Sequence[float] | None,
    wall_s: float,
    backend: str,
    peak_bytes: Mapping[str, int] | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the object of summary.json.

    `reward_before` has the mean reward of each held-out problem before training; None if not
    measured. `peak_bytes` has the largest memory by process, in addition to those in the log.
    """
    limits = log.header.limits
    counts = counted(log)
    summary = {
        "status": run_status(log),
        "mode": log.header.mode,
        "reward_before": _interval(reward_before),
        "reward_after": _interval(reward_after),
        "wall_s": wall_s,
        "eta": limits.get("eta"),
        "schedule": limits.get("schedule"),
        "batch_order": limits.get("order"),
        "backend": backend,
        **counts,
        "peak_bytes": {**counts["peak_bytes"], **(peak_bytes or {})},
        **(more or {}),
    }
    return dict(finite_json(summary))


def counted(log: Log) -> dict[str, Any]:
    """Fields that are counted from the records of the log."""
    batches = list(trained_batches(log))
    start_s, end_s = training_window(log)
    training_s = end_s - start_s
    samples = sum(batch.samples for batch in batches)
    trained_tokens = sum(batch.tokens for batch in batches)
    generated_tokens = sum(
        tokens for group in log.groups for sample in group.segments for _, tokens in sample
    )
    dropped = Counter(r.action.reason for r in log.actions if isinstance(r.action, ev.Drop))
    paused = pauses(log)
    filtered = Counter(r.event.reason for r in log.events if isinstance(r.event, ev.GroupFiltered))
    return {
        "training_s": training_s,
        "steps": len(batches),
        "trained_samples": samples,
        "trained_tokens": trained_tokens,
        "generated_tokens": generated_tokens,
        "tokens_per_s": trained_tokens / training_s if training_s > 0 else 0.0,
        "generated_tokens_per_s": generated_tokens / training_s if training_s > 0 else 0.0,
        "lag": lag_summary(batches),
        "ledger": ledger_summary(ledger_of(log)),
        "interruptions": sum(
            isinstance(r.action, ev.Interrupt) and not r.action.by_hand for r in log.actions
        ),
        "pauses": len(paused),
        "paused_s": sum(end_s - begin_s for begin_s, end_s in paused),
        "eta_changes": eta_changes(log),
        "save_wait_s": sum(save_waits(log)),
        **recoveries(log),
        "multi_version_share": (
            sum(batch.multi_version_samples for batch in batches) / samples if samples else 0.0
        ),
        **asdict(incidents(log)),
        "sample_ends": dict(
            sorted(Counter(end for group in log.groups for end in group.finish_reasons).items())
        ),
        "outcomes": dict(
            sorted(Counter(one for group in log.groups for one in group.outcomes).items())
        ),
        "dropped": dropped.total(),
        "dropped_by_reason": dict(dropped),
        "filtered": filtered.total(),
        "filtered_by_reason": dict(filtered),
        "smaller_batches": _smaller_batches(log),
        "processes": {name: _use(use) for name, use in idle_by_cause(log).items()},
        "trainer_speed": _trainer_speed(log),
        "peak_bytes": _logged_peaks(log),
    }


def _smaller_batches(log: Log) -> int:
    """Training steps with incomplete batches, because dynamic sampling found no more groups."""
    size = log.header.limits.get("batch_groups")
    if log.header.limits.get("batch_parts", 1) != 1:
        return 0  # all parts have the same size (`control.limits`)
    trains = [r.action for r in log.actions if isinstance(r.action, ev.Train)]
    return sum(isinstance(size, int) and len(train.groups) < size for train in trains)


def recoveries(log: Log) -> dict[str, int]:
    """Number of continuations after the run's end or a kill, and of groups that then started
    over without their tokens.
    """
    again = [r.event for r in log.events if isinstance(r.event, ev.RunStarted)][1:]
    over = sum(version == ev.STARTS_OVER for event in again for version in event.open_versions)
    return {"recoveries": len(again), "restarted_groups": over}


def save_waits(log: Log) -> Iterator[float]:
    """Seconds for which each checkpoint delayed the next step, in order.

        TrainStepDone  (CheckpointDone of an earlier one)  Save  ..  CheckpointCopied or Done
              |<------------- if it is there ----------------|<----------->|

    A checkpoint written during training delays by the time to copy its state, and by the rest of
    the checkpoint before it.
    """
    step_done_s, earlier_done, since_s = 0.0, False, None
    for record in log.records:
        match record:
            case EventRecord(t_s=t_s, event=ev.TrainStepDone()):
                step_done_s, earlier_done = t_s, False
            case ActionRecord(t_s=t_s, action=ev.Save()):
                since_s = step_done_s if earlier_done else t_s
            case EventRecord(t_s=t_s, event=ev.CheckpointCopied() | ev.CheckpointDone() as event):
                earlier_done = isinstance(event, ev.CheckpointDone)
                if since_s is not None:
                    yield t_s - since_s
                    since_s = None
            case EventRecord(event=ev.RunStarted()):
                since_s = None  # the run was killed during a save
            case _:
                pass


def run_status(log: Log) -> str:
    """Reason of the run's end, from `Finish`; "incomplete" if the log has none, or "imported"."""
    if log.header.mode == IMPORTED:
        return IMPORTED
    reasons = [r.action.reason for r in log.actions if isinstance(r.action, ev.Finish)]
    return reasons[-1] if reasons else "incomplete"


def lag_summary(batches: Sequence[TrainedBatch]) -> dict[str, dict[str, float]]:
    """Mean and largest lag: head and tail over trained samples, token over trained tokens.

    The head lag is the sum of `before_queue` and `in_queue`. `offered` is the lag before the queue
    of all samples that entered it, trained on or not (`control.ledger`).
    """
    counters = {
        "head": total(batch.head_lags for batch in batches),
        "tail": total(batch.tail_lags for batch in batches),
        "token": total(batch.token_lags for batch in batches),
    }
    parts = LagCounts()
    for batch in batches:
        parts.add(batch.parts)
    counters |= {
        "before_queue": parts.before_queue,
        "in_queue": parts.in_queue,
        "offered": parts.offered,
    }
    return {
        name: {"mean": mean_lag(lags), "max": max(lags, default=0)}
        for name, lags in counters.items()
    }


def ledger_summary(ledger: Ledger) -> dict[str, Any]:
    """What became of the tokens: `generated` is the sum of the others (`TokenCounts`)."""
    return asdict(ledger.tokens())


def _interval(problem_means: Sequence[float] | None) -> dict[str, float | int | None] | None:
    return asdict(mean_interval(problem_means)) if problem_means else None


def _use(use: ProcessUse) -> dict[str, Any]:
    return {
        "busy_share": use.busy_share,
        "idle_share": use.idle_share,
        "busy_s": use.busy_s,
        "idle_s": use.idle_s,
    }


def _trainer_speed(log: Log) -> dict[str, float]:
    """Median of the steps by metric, which omits the slow first ones; of memory the largest."""
    values: dict[str, list[float]] = {}
    for record in log.records:
        if isinstance(record, MetricRecord) and record.process == TRAINER:
            values.setdefault(record.name, []).append(record.value)
    return {
        name: max(values[name]) if name.endswith("_bytes") else median(values[name])
        for name in TRAINER_SPEED
        if name in values
    }


def _logged_peaks(log: Log) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for record in log.records:
        if isinstance(record, MetricRecord) and record.name == PEAK_MEMORY:
            peaks[record.process] = max(peaks.get(record.process, 0), whole(record.value))
    return peaks
