"""Lengths as a run had them, prompt by prompt: group n of the simulation is group n of the run.

A simulation may start groups that the run did not, or did not end: they are given the lengths of
others, from the first on.
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
from simulator.workload.recorded_run import answer_tokens


class RecordedLengths:
    """The same lengths for every seed: what was is not drawn."""

    def __init__(self, tokens: Mapping[GroupId, Sequence[int]], *, max_tokens: int) -> None:
        """Keep them.

        Args:
            tokens: of the answers of each group.
            max_tokens: what is longer is cut there.
        """
        self._max_tokens = max_tokens
        self._of = {group: [min(one, max_tokens) for one in of] for group, of in tokens.items()}
        self._in_order = [self._of[group] for group in sorted(self._of)]
        if not self._in_order:
            raise ValueError("the run has no group with an answer; its lengths cannot be replayed")
        self.samples = len(self._in_order[0])
        """Answers to each prompt."""

    def draw(
        self,
        generator: np.random.Generator,  # noqa: ARG002 - not asked: nothing is left to chance
        groups: int,
        samples: int,
        *,
        step: float = 0.0,
    ) -> NDArray[np.int64]:
        """[groups, samples] tokens of the groups of a training step.

        Raises:
            ValueError: if the run had another number of answers to a prompt.
        """
        self.check_samples(samples)
        first, known = round(step) * groups, self._in_order
        rows = [
            self._of.get(group, known[group % len(known)]) for group in range(first, first + groups)
        ]
        return np.array(rows, np.int64)

    def check_samples(self, samples: int) -> None:
        """Refuse another number of answers to a prompt than the run had.

        Raises:
            ValueError: in one line, with the number.
        """
        if samples != self.samples:
            raise refusal(
                "workload.samples_per_prompt",
                f"workload.samples_per_prompt is {samples}, but the recorded run has "
                f"{self.samples} responses to each prompt; set it to {self.samples}",
            )

    # Part of the protocol; what was recorded has its drift in it.
    def mean_tokens(self, step: float = 0.0) -> float:  # noqa: ARG002
        """Mean of all answers."""
        return float(np.mean([one for of in self._in_order for one in of]))

    def capped_share(self, step: float = 0.0) -> float:  # noqa: ARG002 - as above
        """Share of the answers that have the largest length allowed."""
        return float(np.mean([one >= self._max_tokens for of in self._in_order for one in of]))


def recorded_lengths(source: str, *, max_tokens: int) -> RecordedLengths:
    """Lengths of the run in a folder, or in its events.jsonl.

    Raises:
        ValueError: in one line: no run is named, it has no events, or no answer ended.
    """
    if not source:
        raise ValueError("workload.answers.trace is empty; for kind: recorded, name a run folder")
    file = events_file(Path(source))
    return _read(file, file.stat().st_mtime_ns, max_tokens)


@lru_cache(maxsize=4)
def _read(file: Path, changed_ns: int, max_tokens: int) -> RecordedLengths:  # noqa: ARG001
    """A log is asked for at each look at a configuration; `changed_ns` forgets an old one."""
    return RecordedLengths(answer_tokens(read_events(file)), max_tokens=max_tokens)
