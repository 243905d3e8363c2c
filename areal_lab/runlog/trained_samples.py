"""Every trained sample with the age of its tokens, and the events during its generation.

    started --tokens of version v--> new weights --tokens of v + 1--> ended --> trained at version t

The lag of a token is t minus its version.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.events import EngineId, GroupId, Train, Version
from areal_lab.runlog.records import ActionRecord, GroupRecord, Log, Segments

_MOST: Final = 255
"""Largest lag in a byte; older tokens get this value."""
_MOST_TOKENS: Final = 2**31
_AT_ONCE_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSample:
    """One trained response."""

    group: GroupId
    sample: int
    """Index within its group."""
    engine: EngineId
    started_s: float
    generated_s: float
    """End of the last response of its group."""
    trained_s: float
    """Start of the step that trains on it."""
    trained_version: Version
    """Version of the trainer before that step."""
    segments: Segments
    """(version, tokens), in order."""
    overtaken_by: int
    """Groups that started later and were trained on in an earlier step."""

    @property
    def name(self) -> str:
        """`response 23b` is the second one to prompt 23."""
        letter = chr(ord("a") + self.sample) if self.sample < 26 else f", {self.sample}"
        return f"response {self.group}{letter}"

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(tokens for _, tokens in self.segments)

    @property
    def oldest(self) -> int:
        """Lag of the oldest token, the first one; 0 without tokens."""
        return self.trained_version - self.segments[0][0] if self.segments else 0

    @property
    def lags(self) -> NDArray[np.uint8]:
        """Lag of each token, in versions, at most 255."""
        lags = [min(_MOST, self.trained_version - version) for version, _ in self.segments]
        counts = np.array([tokens for _, tokens in self.segments], dtype=np.intp)
        return np.repeat(np.array(lags, dtype=np.uint8), counts)


def trained_samples(log: Log) -> list[TrainedSample]:
    """Samples of all batches of the trainer, in order."""
    groups: dict[GroupId, GroupRecord] = {record.group: record for record in log.groups}
    batches = [
        (record.t_s, record.action)
        for record in log.records
        if isinstance(record, ActionRecord) and isinstance(record.action, Train)
    ]
    trained: list[GroupId] = []  # in earlier steps, sorted
    found: list[TrainedSample] = []
    for t_s, train in batches:
        for group in train.groups:
            record = groups.get(group)
            if record is None:
                continue
            overtaken_by = len(trained) - bisect_right(trained, group)
            found.extend(
                TrainedSample(
                    group=group,
                    sample=number,
                    engine=record.engine,
                    started_s=record.t_s,
                    generated_s=record.generated_s,
                    trained_s=t_s,
                    trained_version=train.version,
                    segments=segments,
                    overtaken_by=overtaken_by,
                )
                for number, segments in enumerate(record.segments)
            )
        for group in train.groups:
            insort(trained, group)
    if (tokens := sum(one.tokens for one in found)) > _MOST_TOKENS:
        raise ValueError(
            f"the log has {tokens:,} trained tokens, but at most {_MOST_TOKENS:,} can be shown"
        )
    return found


def oldest_first(samples: Iterable[TrainedSample]) -> list[TrainedSample]:
    """Samples by the lag of their oldest token, then by the number of tokens with it, largest
    first.
    """
    return sorted(
        samples,
        key=lambda one: (-one.oldest, -(one.segments[0][1] if one.segments else 0), one.group),
    )


def story(one: TrainedSample) -> str:
    """History of a sample, in sentences."""
    versions = [version for version, tokens in one.segments if tokens]
    changes = len(dict.fromkeys(versions)) - 1
    said = (
        f"{one.name.capitalize()} has {one.tokens} tokens. It was started at "
        f"{one.started_s:.1f} s on engine {one.engine}, under version "
        f"{versions[0] if versions else 0}. "
    )
    if changes > 0:
        often = {1: "once", 2: "twice"}.get(changes, f"{changes} times")
        said += f"New weights arrived {often} while it was generated. "
    waited_s = one.trained_s - one.generated_s
    said += (
        f"Its group ended at {one.generated_s:.1f} s, and was trained on "
        + ("at once" if waited_s < _AT_ONCE_S else f"{waited_s:.1f} s later")
        + f", when the trainer had version {one.trained_version}: its first token was "
        f"{one.oldest} {'version' if one.oldest == 1 else 'versions'} old. "
    )
    if one.overtaken_by:
        many = "1 prompt" if one.overtaken_by == 1 else f"{one.overtaken_by} prompts"
        said += f"By then, {many} that started after it had been trained on."
    return said.strip()
