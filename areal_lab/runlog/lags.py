"""The age of trained tokens: lags of every batch, from the log.

The lag of a token is the version of the trainer before the step minus the version that generated
the token. A sample's head lag is its first token's, its tail lag its last token's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from areal_lab.control.events import GroupId, Train, TrainStepDone, Version
from areal_lab.runlog.records import ActionRecord, EventRecord, GroupRecord, Log


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """One finished training step. Each counter maps a lag in versions to how often it occurred."""

    version: Version
    """After the step."""
    begun_s: float
    done_s: float
    groups: tuple[GroupId, ...]
    head_lags: Counter[int] = field(default_factory=Counter)
    """Over samples."""
    tail_lags: Counter[int] = field(default_factory=Counter)
    """Over samples."""
    token_lags: Counter[int] = field(default_factory=Counter)
    """Over generated tokens."""
    multi_version_samples: int = 0
    """Samples with tokens from two or more versions."""

    @property
    def samples(self) -> int:
        """Samples with at least one generated token."""
        return sum(self.head_lags.values())

    @property
    def tokens(self) -> int:
        """Generated tokens, all of which were trained on."""
        return sum(self.token_lags.values())


def trained_batches(log: Log) -> Iterator[TrainedBatch]:
    """The finished steps, in order; a step that was running at the end of the log is skipped."""
    groups: dict[GroupId, GroupRecord] = {record.group: record for record in log.groups}
    begun: tuple[float, Train] | None = None
    for record in log.records:
        match record:
            case ActionRecord(t_s, Train() as train):
                part = begun is not None and begun[1].rest == len(train.groups) + train.rest
                if begun is not None and part:  # the next one of a batch in parts
                    groups_so_far = begun[1].groups + train.groups
                    begun = begun[0], replace(train, groups=groups_so_far)
                else:
                    begun = t_s, train
            case EventRecord(t_s, TrainStepDone()) if begun is not None:
                yield _batch(begun[1], begun[0], t_s, groups)
                begun = None
            case _:
                pass


def total(counters: Iterable[Counter[int]]) -> Counter[int]:
    """The sum of counters."""
    summed: Counter[int] = Counter()
    for counter in counters:
        summed.update(counter)
    return summed


def mean_lag(lags: Mapping[int, int]) -> float:
    """Mean of a histogram of lags; 0 if it is empty."""
    count = sum(lags.values())
    return sum(lag * times for lag, times in lags.items()) / count if count else 0.0


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
