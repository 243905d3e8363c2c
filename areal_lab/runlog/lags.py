"""The age of trained tokens, and what became of all tokens, from the log.

The lag of a token is the version of the trainer before the step minus the version that generated
the token. A sample's head lag is its first token's, its tail lag its last token's; the head lag is
the sum of the lag before the queue and the lag in the queue (`control.ledger`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from areal_lab.control.events import Drop, GroupId, Train, TrainStepDone, Version
from areal_lab.control.ledger import LagCounts, Ledger
from areal_lab.runlog.records import (
    PIPELINE,
    ActionRecord,
    EventRecord,
    GroupRecord,
    Log,
    MetricRecord,
    Record,
    Segments,
    whole,
)

DROPPED_TOKENS: Final = "dropped_tokens"
"""Metric that follows a `Drop`: tokens that the group had generated when it was dropped."""
DISCARDED_TOKENS: Final = "discarded_tokens"
"""Metric of the tokens so far in place of which others were generated."""


class LoggedLedger:
    """Ledger of a run, from the records of its log in their order."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._dropped: GroupId | None = None  # last
        self._discarded = 0

    def add(self, record: Record) -> None:
        """Follow a record; those of logs that lack some records are counted as far as possible."""
        match record:
            case EventRecord(_, event):
                self.ledger.event(event)
            case ActionRecord(_, action):
                self.ledger.action(action)
                if isinstance(action, Drop):
                    self._dropped = action.group
            case GroupRecord():
                self.ledger.report(record.group, *heads_and_tokens(record.segments))
            case MetricRecord(process=process) if process == PIPELINE:
                self._count(record)
            case _:
                pass

    def _count(self, metric: MetricRecord) -> None:
        if metric.name == DISCARDED_TOKENS:
            discarded = whole(metric.value)
            self.ledger.report_twice(max(0, discarded - self._discarded))
            self._discarded = discarded
        elif metric.name == DROPPED_TOKENS and self._dropped is not None:
            self.ledger.report(self._dropped, {}, whole(metric.value))

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the newest step: parts of the lag of its samples, and tokens so far."""
        tokens = self.ledger.tokens()
        return {
            **{f"lag_{name}_mean": mean for name, mean in self.ledger.step.means.items()},
            "ledger_generated_tokens": tokens.generated,
            "ledger_trained_tokens": tokens.trained,
            "ledger_waiting_tokens": tokens.waiting,
            "ledger_dropped_tokens": tokens.dropped_tokens,
            "ledger_generated_twice_tokens": tokens.generated_twice,
        }


def heads_and_tokens(samples: Iterable[Segments]) -> tuple[Counter[Version], int]:
    """Samples by the version of their first token, and the tokens of all; both without prompts."""
    heads: Counter[Version] = Counter()
    tokens = 0
    for segments in samples:
        if segments:
            heads[segments[0][0]] += 1
            tokens += sum(count for _, count in segments)
    return heads, tokens


def ledger_of(log: Log) -> Ledger:
    """Ledger at the end of a log."""
    logged = LoggedLedger()
    for record in log.records:
        logged.add(record)
    return logged.ledger


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """One finished training step. Each counter maps a lag in versions to how often it occurred."""

    version: Version
    """Version after the step."""
    begun_s: float
    done_s: float
    groups: tuple[GroupId, ...]
    head_lags: Counter[int] = field(default_factory=Counter)
    """Counted over samples."""
    tail_lags: Counter[int] = field(default_factory=Counter)
    """Counted over samples."""
    token_lags: Counter[int] = field(default_factory=Counter)
    """Counted over generated tokens."""
    multi_version_samples: int = 0
    """Samples with tokens from two or more versions."""
    parts: LagCounts = field(default_factory=LagCounts)
    """Parts of the lags of its samples, and of those that entered the queue since the step
    before."""

    @property
    def samples(self) -> int:
        """Samples with at least one generated token."""
        return sum(self.head_lags.values())

    @property
    def tokens(self) -> int:
        """Generated tokens, all of which were trained on."""
        return sum(self.token_lags.values())


def trained_batches(log: Log) -> Iterator[TrainedBatch]:
    """Finished steps, in order; a running step at the end of the log is skipped."""
    groups: dict[GroupId, GroupRecord] = {record.group: record for record in log.groups}
    begun: tuple[float, Train] | None = None
    logged = LoggedLedger()
    for record in log.records:
        logged.add(record)
        match record:
            case ActionRecord(t_s, Train() as train):
                part = begun is not None and begun[1].rest == len(train.groups) + train.rest
                if begun is not None and part:  # the next one of a batch in parts
                    groups_so_far = begun[1].groups + train.groups
                    begun = begun[0], replace(train, groups=groups_so_far)
                else:
                    begun = t_s, train
            case EventRecord(t_s, TrainStepDone()) if begun is not None:
                batch = _batch(begun[1], begun[0], t_s, groups)
                yield replace(batch, parts=logged.ledger.step)
                begun = None
            case _:
                pass


def total(counters: Iterable[Counter[int]]) -> Counter[int]:
    """Sum of counters."""
    summed: Counter[int] = Counter()
    for counter in counters:
        summed.update(counter)
    return summed


def _batch(
    train: Train, begun_s: float, done_s: float, groups: dict[GroupId, GroupRecord]
) -> TrainedBatch:
    head: Counter[int] = Counter()
    tail: Counter[int] = Counter()
    token: Counter[int] = Counter()
    multi = 0
    for group in train.groups:
        record = groups.get(group)
        for segments in record.segments if record else ():
            if not segments:
                continue
            head[train.version - segments[0][0]] += 1
            tail[train.version - segments[-1][0]] += 1
            for version, tokens in segments:
                token[train.version - version] += tokens
            multi += len({version for version, _ in segments}) > 1
    return TrainedBatch(train.version + 1, begun_s, done_s, train.groups, head, tail, token, multi)
