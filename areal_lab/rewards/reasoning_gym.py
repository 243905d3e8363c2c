"""Rewards of Reasoning Gym's tasks, by each task's own rule (`score_answer`), between 0 and 1.

Needs `pip install 'areal_lab[reasoning-gym]'` and `dataset.type=reasoning_gym`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from areal_lab.extras import MissingExtra, require

TAGS: Final = r"(?s)<answer>(.*?)</answer>"
"""The form of answers in Reasoning Gym's own runs."""


class ReasoningGym:
    """A reward function.

    Args:
        pattern: a regular expression whose last match captures the answer in its group; without a
            match there is no answer. Empty takes the whole completion.

    Raises:
        ValueError: the pattern is none, or has not one group.
    """

    def __init__(self, pattern: str = TAGS) -> None:
        self.check(pattern)
        self._pattern = re.compile(pattern) if pattern else None

    @staticmethod
    def check(pattern: str = TAGS) -> None:
        """Check the package and the pattern; preflight calls this.

        Raises:
            ValueError: in one line.
        """
        try:
            require("areal_lab.rewards.reasoning_gym", "reasoning-gym")
        except MissingExtra as error:
            raise ValueError(str(error)) from error
        try:
            groups = re.compile(pattern).groups if pattern else 1
        except re.error as error:
            raise ValueError(f"pattern is {pattern!r}, which is none: {error}") from error
        if groups != 1:
            raise ValueError(f"pattern is {pattern!r}, which has {groups} groups, but needs 1")

    def __call__(self, completion: str, example: Mapping[str, Any]) -> dict[str, float]:
        """The task's score of the answer.

        Raises:
            KeyError: the problem is none of `dataset.type=reasoning_gym`.
        """
        answer = self._answer(completion)
        if answer is None:
            return {"reward": 0.0, "no_answer": 1.0}
        task = _task(str(example["task"]), json.dumps(example["options"]))
        return {"reward": float(task.score_answer(answer, example["entry"])), "no_answer": 0.0}

    def _answer(self, completion: str) -> str | None:
        if self._pattern is None:
            return completion.strip()
        found = self._pattern.findall(completion)
        return found[-1].strip() if found else None


@lru_cache(maxsize=128)
def _task(name: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(options))
