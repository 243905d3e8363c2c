"""Problems, their split into trained and held-out ones, and the endless order they are trained in.

ProblemSet --train--> PromptSource[n]    prompt number n of a run, the same at every call
           --held_out--> evaluation
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt and what is needed to judge an answer to it."""

    prompt: str
    """The text the model completes, few-shot lines and template included."""
    answer: str
    """The gold answer, as the reward function compares it."""
    key: str
    """What makes it this problem: no key is both trained on and held out. `3 + 4` and `4 + 3`
    share one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further fields for the reward function; for a JSONL problem the other fields of its line."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"problem {self.key!r} has an empty prompt")

    def as_example(self) -> dict[str, Any]:
        """What a reward function gets as its second argument: `prompt`, `answer`, the metadata."""
        return {**self.metadata, "prompt": self.prompt, "answer": self.answer}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """Problems to train on and problems to measure on; no key is in both."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("there is no problem to train on")
        if not self.held_out:
            raise ValueError("there is no held-out problem to measure on")
        both = {problem.key for problem in self.train} & {p.key for p in self.held_out}
        if both:
            raise ValueError(
                f"{len(both)} problems are both trained on and held out, as {min(both)!r}"
            )


class PromptSource:
    """Prompt number n of a run, for any n >= 0: shuffled epoch by epoch, addressed at random.

    >>> source = PromptSource(problems, seed=1)
    >>> source[10_000] == source[10_000]      # no position to lose when a run is recovered
    True

    Every epoch holds each problem once. The answer depends on the problems, the seed and n only.
    """

    _EPOCHS_KEPT = 4  # groups in flight lie a few batches apart: at most some epochs of a tiny set

    def __init__(self, problems: Sequence[Problem], *, seed: int) -> None:
        if not problems:
            raise ValueError("a prompt source needs at least one problem")
        self._problems = tuple(problems)
        self._seed = seed
        self._orders: OrderedDict[int, list[int]] = OrderedDict()

    @property
    def epoch_length(self) -> int:
        """Prompts until each problem came once."""
        return len(self._problems)

    def __getitem__(self, n: int) -> Problem:
        """Prompt number `n`.

        Raises:
            IndexError: if n is negative; there is no last prompt to count from.
        """
        if n < 0:
            raise IndexError(f"prompt number is {n}, but must be >= 0")
        epoch, position = divmod(n, len(self._problems))
        return self._problems[self._order(epoch)[position]]

    def _order(self, epoch: int) -> list[int]:
        order = self._orders.get(epoch)
        if order is None:
            order = list(range(len(self._problems)))
            random.Random(f"{self._seed}/prompts/{epoch}").shuffle(order)
            self._orders[epoch] = order
            if len(self._orders) > self._EPOCHS_KEPT:
                self._orders.popitem(last=False)
        return order


SMALLEST_HELD_OUT = 32
"""Fewer problems than this cannot tell 0.5 from 0.85 with confidence."""

LARGEST_HELD_OUT = 256


def held_out_size(problems: int, asked: int) -> int:
    """How many of so many problems to hold out.

    Args:
        asked: the setting; 0 takes a fifth, at least 32 and at most 256, but never above half.

    Raises:
        ValueError: if `asked` is negative or leaves nothing to train on.
    """
    if asked < 0:
        raise ValueError(f"eval_size is {asked}, but must be >= 0 (0 chooses)")
    if asked >= problems:
        raise ValueError(
            f"eval_size is {asked}, but there are {problems} problems: none is left to train on"
        )
    if asked:
        return asked
    return max(1, min(problems // 2, LARGEST_HELD_OUT, max(SMALLEST_HELD_OUT, problems // 5)))
