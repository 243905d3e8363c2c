"""Lengths of a recorded run, prompt by prompt: group n of the simulation is group n of the run.

A simulation may start groups that the run did not start or finish: these get the lengths of other
groups, from the first on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from areal_lab.config.problem import refusal
from areal_lab.control.events import GroupId
from areal_lab.runlog.read_run import events_file, read_events
from simulator.workload.recorded_run import response_tokens


class RecordedLengths:
    """Recorded lengths, which are the same for every seed."""

    def __init__(self, tokens: Mapping[GroupId, Sequence[int]], *, max_tokens: int) -> None:
        """Store the lengths.

        Args:
            tokens: of the responses of each group.
            max_tokens: longer responses are cut off there.
        """
        self._max_tokens = max_tokens
        self._of = {group: [min(one, max_tokens) for one in of] for group, of in tokens.items()}
        self._in_order = [self._of[group] for group in sorted(self._of)]
        if not self._in_order:
            raise ValueError("the run has no group with a response; its lengths cannot be replayed")
        self.samples = len(self._in_order[0])
        """Responses per prompt."""

    def draw(
        self,
        generator: np.random.Generator,  # noqa: ARG002 - unused: nothing is random
        groups: int,
        samples: int,
        *,
        step: float = 0.0,
    ) -> NDArray[np.int64]:
        """[groups, samples] tokens of the groups of a training step.

        Raises:
            ValueError: if the run had another number of responses per prompt.
        """
        self.check_samples(samples)
        first, known = round(step) * groups, self._in_order
        rows = [
            self._of.get(group, known[group % len(known)]) for group in range(first, first + groups)
        ]
        return np.array(rows, np.int64)

    def check_samples(self, samples: int) -> None:
        """Refuse a number of responses per prompt that differs from the run's.

        Raises:
            ValueError: one line, with the number.
        """
        if samples != self.samples:
            raise refusal(
                "workload.samples_per_prompt",
                f"workload.samples_per_prompt is {samples}, but the recorded run has "
                f"{self.samples} responses per prompt; set it to {self.samples}",
            )

    # Part of the protocol; recorded lengths include their drift.
    def mean_tokens(self, step: float = 0.0) -> float:  # noqa: ARG002
        """Mean of all responses."""
        return float(np.mean([one for of in self._in_order for one in of]))

    def capped_share(self, step: float = 0.0) -> float:  # noqa: ARG002 - as above
        """Share of the responses that have the largest allowed length."""
        return float(np.mean([one >= self._max_tokens for of in self._in_order for one in of]))


def recorded_lengths(source: str, *, max_tokens: int) -> RecordedLengths:
    """Lengths of the run in a folder or an events.jsonl file.

    Raises:
        ValueError: one line: no run is given, it has no events, or no response ended.
    """
    if not source:
        raise ValueError(
            "workload.answers.trace is empty; for kind: recorded, set it to a run folder"
        )
    file = events_file(Path(source))
    return _read(file, file.stat().st_mtime_ns, max_tokens)


@lru_cache(maxsize=4)
def _read(file: Path, changed_ns: int, max_tokens: int) -> RecordedLengths:  # noqa: ARG001
    """Read a log once, although every check of a config needs it; `changed_ns` expires old ones."""
    return RecordedLengths(response_tokens(read_events(file)), max_tokens=max_tokens)
