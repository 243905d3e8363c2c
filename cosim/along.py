"""Learn along a log: it says who learns from what under which version.

    log      Train(version 3, groups 5, 9, ...)       GroupRecord 5: segments ((2, 4100), (3, 5177))
    policy   learn -> version 4 -> generate, in one batch, all that version 4 generates in the log

The log is simulated or recorded, and its schedule is the same whatever the model learns. Real token
i of n takes the version at the share i/n of the logged response. Only groups that are trained on
are generated; those that the log drops, or never trains, have rewards of nan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from areal_lab.control.events import Finish, GroupId, Train, TrainStepDone, Version
from areal_lab.runlog.records import ActionRecord, EventRecord, GroupRecord, Log, Record
from cosim.policy import Policy
from cosim.sampler import Row, cuts, kept_by_share, kept_by_tokens
from cosim.steps import Steps


@dataclass(slots=True, eq=False)
class _Planned:
    """A row, and the simulated tokens at which each of its versions ends."""

    row: Row
    cuts: list[tuple[Version, int]]


def train_actions(log: Log) -> list[Train]:
    """The training steps of a log that have ended, in order."""
    found: list[Train] = []
    begun: Train | None = None
    for record in log.records:
        match record:
            case ActionRecord(action=Train() as train):
                begun = train
            case EventRecord(event=TrainStepDone()) if begun is not None:
                found.append(begun)
                begun = None
            case _:
                pass
    return found


def until_step(log: Log, steps: int) -> Iterator[Record]:
    """The records of a log up to the end of a training step, with the actions that follow it."""
    ended = False
    for record in log.records:
        if ended and not isinstance(record, ActionRecord):
            return
        yield record
        match record:
            case EventRecord(event=TrainStepDone(version=version)) if version == steps:
                # The last step of a log is followed by its checkpoint and the end of the run.
                ended = not _ends_with(log, steps)
            case _:
                pass


def _ends_with(log: Log, steps: int) -> bool:
    """Return whether a log ends after this training step."""
    trained = len(train_actions(log))
    return trained == steps and any(isinstance(one.action, Finish) for one in log.actions)


def follow(
    log: Log, policy: Policy, steps: Steps, *, train_steps: int, tokens_per_token: int = 0
) -> None:
    """Let a policy generate and learn along a log, and pass its records on.

    Args:
        steps: receives the records, with the rewards of what the policy generated.
        tokens_per_token: logged tokens that a real one stands for; 0 takes shares of each response.
    """
    trained = [group for train in train_actions(log)[:train_steps] for group in train.groups]
    rows = _plan(log, policy, trained)
    at: dict[Version, list[_Planned]] = {}
    for group in trained:
        for planned in rows[group]:
            for version, _ in planned.cuts:
                at.setdefault(version, []).append(planned)
    kept = partial(kept_by_tokens, tokens_per_token=tokens_per_token)
    generate = partial(_generate, policy, at, kept if tokens_per_token else None)
    steps.write(log.header)
    steps.measure(policy)
    generate()
    for record in until_step(log, train_steps):
        match record:
            case ActionRecord(action=Train() as train) if train.version < train_steps:
                steps.write(record)
                steps.learn(policy, [[one.row for one in rows.pop(g)] for g in train.groups])
                generate()
            case GroupRecord(group=group):
                steps.write(_scored(record, policy, rows.get(group)))
            case _:
                steps.write(record)


def _plan(log: Log, policy: Policy, trained: list[GroupId]) -> dict[GroupId, list[_Planned]]:
    """The rows of all groups that are trained on, and when their versions change."""
    records = {record.group: record for record in log.groups}
    plans: dict[GroupId, list[_Planned]] = {}
    for group in trained:
        if group not in records:
            raise ValueError(f"the log trains on group {group}, but has no record of it")
        rows, segments = policy.begin(group), records[group].segments
        if len(rows) != len(segments) or not all(segments):
            raise ValueError(
                f"group {group} of the log has {sum(map(bool, segments))} samples with tokens, but "
                f"gconfig.n_samples is {len(rows)}; make them equal"
            )
        plans[group] = [_Planned(row, cuts(one)) for row, one in zip(rows, segments, strict=True)]
    return plans


def _generate(
    policy: Policy,
    at: dict[Version, list[_Planned]],
    kept_by: Callable[[int, int], int] | None,
) -> None:
    """Generate everything that the policy's version generates in the log, in one batch."""
    version = policy.version
    planned = at.pop(version, [])
    policy.generate([one.row for one in planned], version)
    for one in planned:
        (_, until), *later = one.cuts
        if later:
            simulated, real = later[-1][1], len(one.row.tokens)
            kept = kept_by(real, until) if kept_by else kept_by_share(real, until, simulated)
            one.row.cut(kept)
        one.cuts = later


def _scored(record: GroupRecord, policy: Policy, planned: list[_Planned] | None) -> GroupRecord:
    """The record of a group with the rewards of its real rows; nan if it is never trained on."""
    if planned is None:
        return replace(record, rewards=(math.nan,) * len(record.segments))
    rows = [one.row for one in planned]
    policy.score(rows)
    return replace(
        record,
        rewards=tuple(row.reward for row in rows),
        finish_reasons=tuple(str(row.finish_reason) for row in rows),
    )
