"""Run folder of an imported log, which `trace`, notebooks and sinks read as any other.

    ImportedRun --steps--> metrics.jsonl    names of our own metrics, and those of the log
                --parts--> events.jsonl     spans of each step, one after the other
                --alarms-> alarms.jsonl     rules of our own runs, remedies in the log's names
                           config.yaml, summary.json

A log has seconds of parts, and not when they began: a synchronous step is laid out as weights,
generation, log-probs, training; an asynchronous one has the trainer's parts only. What a step has
besides is idle time "not in the log". Groups and samples are not in a log, so that pictures of them
are empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

from omegaconf import OmegaConf

from areal_lab.config.sections import AlarmsConfig
from areal_lab.foreign.record import ImportedRun, Step
from areal_lab.foreign.setting_names import translated
from areal_lab.host.durable import expanded, replace_text
from areal_lab.metrics.alarm import Alarm, Facts
from areal_lab.runlog.activity import NOT_IN_THE_LOG, WAIT_BATCH
from areal_lab.runlog.alarm_log import FILE as ALARMS
from areal_lab.runlog.alarms import alarms_of, changes_of
from areal_lab.runlog.read_run import METRICS
from areal_lab.runlog.records import (
    IMPORTED,
    TRAINER,
    MetricRecord,
    Record,
    RunHeader,
    SpanRecord,
    encode,
)

_ALL_PARTS: Final = "all parts"
"""Process of a synchronous run, whose parts follow each other."""
_METRICS: Final[Mapping[str, str]] = {
    "step_time_s": "step_s",
    "reward_mean": "reward_mean",
    "reward_std": "reward_std",
    "truncated_fraction": "truncated_share",
    "response_length_mean": "response_tokens_mean",
    "response_length_max": "response_tokens_max",
    "response_tokens": "trained_tokens",
    "samples_per_step": "trained_samples",
    "turns_mean": "turns_mean",
    "lag_mean": "lag_token_mean",
    "lag_max": "lag_token_max",
    "drift_logp_abs_mean": "drift",
    "behavior_weight_mean": "behavior_weight_mean",
    "weight_deviation": "weight_deviation",
    "clip_fraction": "clip_fraction",
    "entropy": "entropy",
    "reference_kl": "reference_kl_mean",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "optimizer_steps": "optimizer_steps",
    "tokens_per_s_total": "tokens_per_s",
    "tokens": "logged_tokens",
    "samples": "logged_samples",
}
"""Our metric of the same meaning, by the quantity of a log. Others keep their names, except those
that mean something else in a run folder."""
_PARTS: Final[Mapping[str, str]] = {
    "weight_sync_s": "update weights",
    "generation_s": "generate",
    "wait_for_batch_s": "wait",
    "reward_s": "score",
    "old_logprob_s": "proximal log-probs",
    "reference_s": "reference log-probs",
    "logprobs_s": "log-probs",
    "advantage_s": "advantages",
    "training_s": "forward/backward",
    "critic_s": "critic",
    "validation_s": "evaluate",
    "save_s": "save",
}
"""Span of a part, by the quantity of a log, in the order of a synchronous step."""
_HIDDEN: Final = ("generation_s", "reward_s")
"""Parts of an asynchronous run that overlap with the trainer's."""


def import_into(run: ImportedRun, folder: Path | str) -> Path:
    """Write the run folder of an imported log; returns it.

    Args:
        run: the last attempt counts.
        folder: new or empty.

    Raises:
        ValueError: nothing was read, no step has a duration, or the folder has files.
        OSError: the folder cannot be written.
    """
    if run.refused is not None:
        raise ValueError(f"nothing to write: {run.refused}")
    lines = metric_lines(run)
    if not lines:
        raise ValueError("nothing to write: the log has no step with a number")
    path = expanded(str(folder), "the folder")
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise ValueError(f"{path} has files; name a new folder")
    alarms = health(run, lines)
    _write_lines(path / METRICS, lines)
    (path / "events.jsonl").write_text(
        "".join(f"{encode(one)}\n" for one in records(run, lines)), encoding="utf-8"
    )
    changes = [
        {"kind": kind, "time_s": 0.0, **asdict(alarm)}
        for alarm in alarms
        for kind in (("begun", "ended") if alarm.ended_step is not None else ("begun",))
    ]
    if changes:
        _write_lines(path / ALARMS, changes)
    OmegaConf.save(OmegaConf.create({"imported": _settings(run)}), path / "config.yaml")
    replace_text(path / "summary.json", json.dumps(_summary(run, alarms), indent=2))
    return path


def metric_lines(run: ImportedRun) -> list[dict[str, float | int]]:
    """Lines of metrics.jsonl: a step each, in the order of their numbers.

    Records of several processes of one step are joined; the trainer's values count.
    """
    joined: dict[int, dict[str, float | int]] = {}
    for one in sorted(run.steps, key=lambda one: (one.step, one.role == TRAINER)):
        joined.setdefault(one.step, {}).update(_numbers(one))
    ends = _ends(run, list(joined))
    lines = []
    for number, values in sorted(joined.items()):
        line: dict[str, float | int] = {"step": number, "version": number, **values}
        if number in ends:
            line["time_s"] = ends[number]
        _add_equal_rewards(line)
        lines.append(line)
    return lines


def records(run: ImportedRun, lines: Sequence[Mapping[str, float | int]]) -> Iterator[Record]:
    """The event log: a header, and spans and metrics of each step that has a duration."""
    synchronous = "wait_for_batch_s" not in {name for line in lines for name in line}
    process = _ALL_PARTS if synchronous else TRAINER
    yield RunHeader(
        mode=IMPORTED,
        started_at=0.0,
        limits={
            "framework": run.framework,
            "version": run.version,
            "schedule": run.mode or ("synchronous" if synchronous else "asynchronous"),
        },
        processes=(process,),
    )
    for line in lines:
        step_s, end_s = _step_s(line), line.get("time_s")
        if step_s is None or end_s is None:
            continue
        at_s = max(0.0, end_s - step_s)
        parts = [
            (name, float(line[quantity]))
            for quantity, name in _PARTS.items()
            if quantity in line and (synchronous or quantity not in _HIDDEN)
        ]
        for name, seconds in (*parts, (NOT_IN_THE_LOG, math.inf)):
            until_s = min(end_s, at_s + max(0.0, seconds))
            if until_s > at_s:
                cause = {"wait": WAIT_BATCH, NOT_IN_THE_LOG: NOT_IN_THE_LOG}.get(name, "")
                yield SpanRecord(
                    process=process,
                    name=name,
                    t_s=at_s,
                    end_s=until_s,
                    cause=cause,
                    args={"step": line["step"]},
                )
            at_s = until_s
        for name in ("lag_token_mean", "response_tokens_mean", "reward_mean"):
            if name in line:
                yield MetricRecord(process=process, name=name, t_s=end_s, value=float(line[name]))


def health(run: ImportedRun, lines: Sequence[Mapping[str, float | int]]) -> list[Alarm]:
    """Alarms of our own runs on the steps of a log, with remedies in the framework's names.

    The bound on staleness is not in a log, so that lag is compared with that of an unbounded run.
    """
    found = alarms_of(changes_of(lines, Facts(eta=math.inf), AlarmsConfig()))
    return [replace(one, remedy=translated(one.remedy, run.framework)) for one in found]


def part_rows(
    run: ImportedRun, lines: Sequence[Mapping[str, float | int]]
) -> list[dict[str, float | str]]:
    """Seconds of each part of each step as rows of a picture: `step`, `part`, `seconds`, `place`.

    `place` is the order within the step. Empty if no step has a duration.
    """
    spans = [one for one in records(run, lines) if isinstance(one, SpanRecord)]
    places = {name: place for place, name in enumerate((*_PARTS.values(), NOT_IN_THE_LOG))}
    return [
        {
            "step": one.args["step"],
            "part": WAIT_BATCH if one.cause == WAIT_BATCH else one.name,
            "seconds": one.end_s - one.t_s,
            "place": places[one.name],
        }
        for one in spans
    ]


def _numbers(step: Step) -> dict[str, float | int]:
    """Quantities of a step by our name, and those that no table knows by the log's."""
    known = {
        _METRICS.get(name, name): value
        for name in step.values
        if (value := step.number(name)) is not None and math.isfinite(value)
    }
    other = {name: value for name, value in step.other.items() if math.isfinite(value)}
    return {**other, **known}


def _step_s(line: Mapping[str, float | int]) -> float | None:
    for name in ("step_s", "trainer_step_s", "orchestrator_step_s"):
        if name in line and line[name] > 0:
            return float(line[name])
    return None


def _ends(run: ImportedRun, numbers: Sequence[int]) -> dict[int, float]:
    """Seconds from the start to the end of each step.

    Time stamps of the lines, where all steps have them in order; else sums of the step times.
    """
    stamps: dict[int, float] = {}
    seconds: dict[int, float] = {}
    for one in run.steps:
        line = _numbers(one)
        if (own := _step_s(line)) is not None:
            seconds[one.step] = own
        if one.time_s is not None:
            stamps[one.step] = one.time_s
    if not seconds:
        return {}
    ordered = sorted(numbers)
    first = ordered[0]
    if stamped(run) and first in seconds:
        start = stamps[first] - seconds[first]
        return {number: stamps[number] - start for number in ordered}
    timed = [number for number in ordered if number in seconds]
    return dict(zip(timed, accumulate(seconds[number] for number in timed), strict=True))


def stamped(run: ImportedRun) -> bool:
    """Return whether the time axis is that of the log's time stamps."""
    by_step: dict[int, float] = {}
    for one in run.steps:
        if one.time_s is not None:
            by_step[one.step] = one.time_s
    if len(by_step) < len({one.step for one in run.steps}):
        return False
    times = [by_step[number] for number in sorted(by_step)]
    return all(before < after for before, after in pairwise(times))


def _add_equal_rewards(line: dict[str, float | int]) -> None:
    """Samples of groups whose rewards are all equal, from their share."""
    share, samples = line.get("zero_variance_fraction"), line.get("trained_samples")
    if share is not None and samples:
        line["zero_advantage_samples"] = round(share * samples)


def _settings(run: ImportedRun) -> dict[str, Any]:
    known = {name: value for name, value in run.settings.items() if value is not None}
    return {"framework": run.framework, "version": run.version, "mode": run.mode, **known}


def _summary(run: ImportedRun, alarms: Sequence[Alarm]) -> dict[str, Any]:
    axis = "time stamps of the log" if stamped(run) else "sum of step times"
    return {
        "status": IMPORTED,
        "imported": _settings(run),
        "time_axis": axis,
        "validation": run.validation,
        "missing": run.missing,
        "derived": run.derived,
        "ambiguous": run.ambiguous,
        "unread": dict(run.unread),
        "unknown_keys": sorted(run.unknown),
        "notes": run.notes,
        "alarms": [asdict(one) for one in alarms],
    }


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text(
        "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in lines), encoding="utf-8"
    )
