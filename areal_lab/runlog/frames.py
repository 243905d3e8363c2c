"""A recorded run as pandas frames: steps, groups, spans, samples.

Columns in seconds (`_s`) count from the start of the run. Needs pandas, of the notebooks extra.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pandas as pd

from areal_lab.control import events as ev
from areal_lab.control.ledger import LagCounts, mean_lag
from areal_lab.runlog.lags import trained_batches
from areal_lab.runlog.records import (
    ActionRecord,
    EventRecord,
    GroupRecord,
    Log,
    Segments,
    SpanRecord,
)
from areal_lab.runlog.token_files import Samples


def steps_frame(log: Log, metrics: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per step: times, counts and lags from the log, the other columns from the metrics."""
    rows: dict[int, dict[str, Any]] = {}
    for batch in trained_batches(log):
        rows[batch.version] = {
            "begun_s": batch.begun_s,
            "done_s": batch.done_s,
            "groups": len(batch.groups),
            "samples": batch.samples,
            "tokens": batch.tokens,
            "multi_version_samples": batch.multi_version_samples,
            **_lag_columns("head", batch.head_lags),
            **_lag_columns("tail", batch.tail_lags),
            **_lag_columns("token", batch.token_lags),
            **{f"lag_{part}_mean": mean for part, mean in batch.parts.means.items()},
        }
    for line in metrics:
        if "step" in line:
            rows[int(line["step"])] = {**line, **rows.get(int(line["step"]), {})}
    steps = sorted(rows)
    found = dict.fromkeys(["step", *_LOG_COLUMNS, *(name for row in rows.values() for name in row)])
    return pd.DataFrame(
        [{**rows[step], "step": step} for step in steps],
        index=pd.Index(steps, dtype="int64"),  # without a name, which the column has
        columns=list(found),
    )


_LOG_COLUMNS = (
    *("begun_s", "done_s", "groups", "samples", "tokens", "multi_version_samples"),
    *(f"lag_{what}_{how}" for what in ("head", "tail", "token") for how in ("mean", "max")),
    *(f"lag_{part}_mean" for part in LagCounts().means),
)
"""Columns of `steps` that every log has."""


def _lag_columns(name: str, lags: Counter[int]) -> dict[str, float]:
    return {f"lag_{name}_mean": mean_lag(lags), f"lag_{name}_max": max(lags, default=0)}


def groups_frame(log: Log) -> pd.DataFrame:
    """One row per started group: times, rewards, versions and its outcome, of its last attempt."""
    rows: dict[ev.GroupId, dict[str, Any]] = {}
    running: tuple[ev.GroupId, ...] = ()
    for record in log.records:
        match record:
            case EventRecord(_, ev.RunStarted() as event):
                _forget_restarted(rows, event)
            case ActionRecord(t_s, ev.StartGroup(group=group, engine=engine)):
                if rows.get(group, {}).get("reason") == ev.RECYCLED:
                    del rows[group]  # what follows is of another attempt
                row = rows.setdefault(group, {"started_s": t_s, "outcome": "running"})
                row["engine"] = engine  # the last one, if the first was lost
            case GroupRecord():
                rows.setdefault(record.group, {}).update(_group_columns(record))
            case EventRecord(_, ev.GroupFiltered(group=group, reason=reason)):
                rows.setdefault(group, {}).update({"outcome": "filtered", "reason": reason})
            case ActionRecord(_, ev.Drop(group=group, reason=reason)):
                rows.setdefault(group, {}).update({"outcome": "dropped", "reason": reason})
            case ActionRecord(_, ev.Train(version=version, groups=running)):
                for group in running:
                    rows.setdefault(group, {}).update({"outcome": "training", "step": version + 1})
            case EventRecord(_, ev.TrainStepDone() | ev.TrainPartDone()):
                for group in running:
                    rows[group]["outcome"] = "trained"
            case _:
                pass
    frame = pd.DataFrame(list(rows.values()), columns=list(_GROUP_COLUMNS))
    frame.index = pd.Index(list(rows), name="group", dtype="int64")
    return frame.astype({name: kind for name, kind in _GROUP_COLUMNS.items() if kind})


def _forget_restarted(rows: dict[ev.GroupId, dict[str, Any]], event: ev.RunStarted) -> None:
    """Discard the earlier values of groups that start over after a recovery."""
    for group, version in zip(event.open_groups, event.open_versions, strict=True):
        if version == ev.STARTS_OVER:
            rows.pop(group, None)


_GROUP_COLUMNS = {
    "outcome": "",
    "reason": "",
    "step": "Int64",
    "engine": "Int64",
    "started_s": "float64",
    "generated_s": "float64",
    "end_s": "float64",
    "samples": "Int64",
    "tokens": "Int64",
    "reward_mean": "float64",
    "reward_std": "float64",
    "head_version": "Int64",
    "tail_version": "Int64",
}
"""Columns of `groups` and their types; "" is text. Running groups lack many values."""


def _group_columns(record: GroupRecord) -> dict[str, Any]:
    versions = [version for sample in record.segments for version, _ in sample]
    rewards = [reward for reward in record.rewards if math.isfinite(reward)]
    return {
        "outcome": "finished",
        "engine": record.engine,
        "generated_s": record.generated_s,
        "end_s": record.end_s,
        "samples": len(record.segments),
        "tokens": sum(tokens for sample in record.segments for _, tokens in sample),
        "reward_mean": fmean(rewards) if rewards else math.nan,
        "reward_std": pstdev(rewards) if rewards else math.nan,
        "head_version": min(versions, default=None),
        "tail_version": max(versions, default=None),
    }


def spans_frame(log: Log) -> pd.DataFrame:
    """One row per span, in the order of their ends; each argument has a column."""
    spans: list[SpanRecord] = list(log.spans)
    frame = pd.DataFrame(
        {
            "process": [span.process for span in spans],
            "name": [span.name for span in spans],
            "start_s": [span.t_s for span in spans],
            "end_s": [span.end_s for span in spans],
            "seconds": [span.end_s - span.t_s for span in spans],
            "cause": [span.cause for span in spans],
        }
    )
    for name in dict.fromkeys(name for span in spans for name in span.args):
        frame[name] = [span.args.get(name, math.nan) for span in spans]
    return frame


def samples_frame(log: Log, samples: Samples) -> pd.DataFrame:
    """One row per sample, from the trajectories; from the log if there are none."""
    return _from_trajectories(samples) if samples.rows else _from_log(log)


def _from_trajectories(samples: Samples) -> pd.DataFrame:
    rows, tokens = samples.rows, samples.tokens
    versions = [row[row >= 0] for row in tokens.rows("versions")]
    named = dict.fromkeys(name for row in rows for name in row.rewards)
    return pd.DataFrame(
        {
            "step": [row.step for row in rows],
            "group": [row.group for row in rows],
            "sample": [row.sample for row in rows],
            "reward": [row.reward for row in rows],
            **{
                f"reward_{name}": [row.rewards.get(name, math.nan) for row in rows]
                for name in named
            },
            "tokens": [row.tokens for row in rows],
            "prompt_tokens": [len(row.prompt_tokens) for row in rows],
            "head_version": [int(own[0]) if len(own) else ev.PROMPT_VERSION for own in versions],
            "tail_version": [int(own[-1]) if len(own) else ev.PROMPT_VERSION for own in versions],
            "versions": [len(np.unique(own)) for own in versions],
            "lag_mean": tokens.mean("lag"),
            "advantage": samples.advantages,
            "finish_reason": [row.finish_reason for row in rows],
            "prompt": [row.prompt for row in rows],
            "completion": [row.completion for row in rows],
        }
    )


def _from_log(log: Log) -> pd.DataFrame:
    groups = {record.group: record for record in log.groups}
    rows = [
        {
            "step": batch.version,
            "group": group,
            "sample": sample,
            "reward": groups[group].rewards[sample],
            "tokens": sum(tokens for _, tokens in segments),
            "head_version": segments[0][0],
            "tail_version": segments[-1][0],
            "versions": len({version for version, _ in segments}),
            "lag_mean": _mean_lag(segments, batch.version - 1),
            "finish_reason": groups[group].finish_reasons[sample],
        }
        for batch in trained_batches(log)
        for group in batch.groups
        if group in groups
        for sample, segments in enumerate(groups[group].segments)
        if segments
    ]
    return pd.DataFrame(rows, columns=list(_SAMPLE_COLUMNS)).astype(_SAMPLE_COLUMNS)


_SAMPLE_COLUMNS = {
    **dict.fromkeys(("step", "group", "sample"), "int64"),
    "reward": "float64",
    **dict.fromkeys(("tokens", "head_version", "tail_version", "versions"), "int64"),
    "lag_mean": "float64",
    "finish_reason": "str",
}
"""Columns of `samples` that every log has, and their types."""


def _mean_lag(segments: Segments, trainer: int) -> float:
    lags: Counter[int] = Counter()
    for version, tokens in segments:
        lags[trainer - version] += tokens
    return mean_lag(lags)
