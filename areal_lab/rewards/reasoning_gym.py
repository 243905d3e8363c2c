"""Rewards of Reasoning Gym's tasks, by each task's own rule (`score_answer`), between 0 and 1.

An answer that makes the rule raise gets 0 and the component `unreadable`, if the rule can score the
gold answer. A rule that fails for the gold answer, too, gives no reward.

Needs `pip install 'areal_lab[reasoning-gym]'` and `dataset.type=reasoning_gym`.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from areal_lab.extras import MissingExtra, require
from areal_lab.host.isolation import LevelSetting

TAGS: Final = r"(?s)<answer>(.*?)</answer>"
"""Form of answers in Reasoning Gym's own runs."""

# Their `score_answer` passes the answer to `eval` or to SymPy's `parse_expr`, which also calls
# `eval`. `composite` scores with the tasks that it consists of. The slow test of the adapters
# compares this with the source of the installed package.
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
"""Tasks that evaluate the model's text, in the reward's process."""
_BOARDS: Final = frozenset({"arc_agi", "rearc"})
"""Tasks that compare with a tuple of tuples, which JSON turns into lists."""
_NO_NUMBER: Final = re.compile(r"(?i)[\d\s.+*/ij()-]*(?:nan|inf(?:inity)?)[\d\s.+*/ij()naft-]*")
"""Text that Python reads as a number without a value; `complex_arithmetic` pays 1 for `nan`."""


def refuse_evaluated(tasks: Iterable[str], sandbox: LevelSetting) -> None:
    """Refuse tasks whose score evaluates the model's text, unless `reward.sandbox` is `unsafe`.

    No level contains a function that is called in the reward's process.
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
        ValueError: the pattern is invalid, or does not have exactly one group.
    """

    runs_programs: Final = False
    """False: tasks that would need containment are refused, so no level has to work here."""

    def __init__(self, pattern: str = TAGS, *, sandbox: LevelSetting = "auto") -> None:
        self.check(pattern)
        self._sandbox: LevelSetting = sandbox
        self._pattern = re.compile(pattern) if pattern else None

    @staticmethod
    def check(pattern: str = TAGS, **_: object) -> None:
        """Check the package and the pattern; `areal_lab.resolve` calls this."""
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
        """Score of the answer by its task."""
        name = str(example["task"])
        refuse_evaluated([name], self._sandbox)
        answer = self._answer(completion)
        if answer is None:
            return {"reward": 0.0, "no_answer": 1.0, "unreadable": 0.0}
        task = _task(name, json.dumps(example["options"]))
        try:
            reward = _score(task, name, answer, example["entry"])
        except Exception:
            # The answer is to blame if the gold answer can be scored; else there is no reward.
            _score(task, name, example["entry"]["answer"], example["entry"])
            return {"reward": 0.0, "no_answer": 0.0, "unreadable": 1.0}
        return {"reward": reward, "no_answer": 0.0, "unreadable": 0.0}

    def _answer(self, completion: str) -> str | None:
        if self._pattern is None:
            return completion.strip()
        found = self._pattern.findall(completion)
        return found[-1].strip() if found else None


def _score(task: Any, name: str, answer: str | None, entry: Mapping[str, Any]) -> float:
    """Score by the task's rule, on a copy: some rules change the problem."""
    if answer is not None and answer != entry.get("answer") and _NO_NUMBER.fullmatch(answer):
        raise ValueError(f"{answer[:20]!r} is not a number")
    entry = copy.deepcopy(dict(entry))
    if name in _BOARDS:
        board = entry["metadata"]["output"]
        entry["metadata"]["output"] = tuple(tuple(row) for row in board)
    score = float(task.score_answer(answer, entry))
    if not math.isfinite(score):
        raise ValueError(f"{name} scored {score}")
    return score


@lru_cache(maxsize=128)
def _task(name: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(options))
