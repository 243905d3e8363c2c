"""Rewards of Reasoning Gym's tasks, by each task's own rule (`score_answer`), between 0 and 1.

Needs `pip install 'areal_lab[reasoning-gym]'` and `dataset.type=reasoning_gym`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from areal_lab.extras import MissingExtra, require
from areal_lab.host.isolation import LevelSetting

TAGS: Final = r"(?s)<answer>(.*?)</answer>"
"""The form of answers in Reasoning Gym's own runs."""

# Their `score_answer` gives the answer to `eval` or to SymPy's `parse_expr`, which is `eval`, too.
# `composite` scores by the tasks that it is made of. The slow test of the adapters compares this
# with the source of the installed package.
EVALUATES: Final = frozenset(
    {
        "binary_matrix",
        "composite",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Tasks that run what the model writes, in the reward's process."""


def refuse_evaluated(tasks: Iterable[str], sandbox: LevelSetting) -> None:
    """Refuse tasks whose score runs the model's text, unless that was asked for.

    Args:
        tasks: names.
        sandbox: value of `reward.sandbox`; only `unsafe` lets them pass, since no level contains a
            function that is called in the reward's process.

    Raises:
        ValueError: in one line.
    """
    refused = sorted(EVALUATES.intersection(tasks))
    if refused and sandbox != "unsafe":
        raise ValueError(
            f"scores of {', '.join(refused)} evaluate the model's text as Python, outside of a "
            "sandbox; choose other tasks, or write reward.sandbox=unsafe (sandbox: unsafe for a "
            "part of Combined) to run model code with your rights"
        )


class ReasoningGym:
    """A reward function.

    Args:
        pattern: a regular expression whose last match captures the answer in its group; without a
            match there is no answer. Empty takes the whole completion.
        sandbox: `unsafe` allows tasks of `EVALUATES`; nothing is contained with any value.

    Raises:
        ValueError: the pattern is none, or has not one group.
    """

    runs_programs: Final = False
    """It refuses what it would have to contain, so it needs no level that works here."""

    def __init__(self, pattern: str = TAGS, *, sandbox: LevelSetting = "auto") -> None:
        self.check(pattern)
        self._sandbox: LevelSetting = sandbox
        self._pattern = re.compile(pattern) if pattern else None

    @staticmethod
    def check(pattern: str = TAGS, **_: object) -> None:
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
            ValueError: the task is one of `EVALUATES`, and the sandbox is not `unsafe`.
        """
        name = str(example["task"])
        refuse_evaluated([name], self._sandbox)
        answer = self._answer(completion)
        if answer is None:
            return {"reward": 0.0, "no_answer": 1.0}
        task = _task(name, json.dumps(example["options"]))
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
