"""Problems that Reasoning Gym generates: `dataset.type=reasoning_gym`.

Needs `pip install 'areal_lab[reasoning-gym]'`. Answers are scored by the task itself, with
`reward.fn=areal_lab.rewards.reasoning_gym:ReasoningGym`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_lab.data.jsonl import split_problems
from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.extras import require

require("areal_lab.data.reasoning_gym", "reasoning-gym")

import reasoning_gym  # noqa: E402 - only if it is there


def reasoning_problems(
    tasks: Mapping[str, Mapping[str, Any]],
    *,
    size: int,
    seed: int,
    prompt_template: str = "{prompt}",
    eval_size: int = 0,
) -> ProblemSet:
    """Problems of some tasks, mixed and split; equal questions stay together.

    Args:
        tasks: options of each, by name.
        size: problems of each.
        seed: of the problems and of the split.
        prompt_template: text around each question; `{prompt}` is replaced.
        eval_size: held-out problems.

    Raises:
        ValueError: in one line: a task or an option is unknown or out of its bounds.
    """
    if not tasks:
        raise ValueError("dataset.tasks is empty, but must name a task, as {leg_counting: {}}")
    problems: list[Problem] = []
    for name, options in tasks.items():
        for entry in _dataset(name, options or {}, size=size, seed=seed):
            problems.append(
                Problem(
                    prompt=prompt_template.replace("{prompt}", str(entry["question"])),
                    answer="" if entry["answer"] is None else str(entry["answer"]),
                    key=f"{name}: {entry['question']}",
                    metadata={"task": name, "options": dict(options or {}), "entry": entry},
                )
            )
    where = ("dataset.tasks", "dataset.tasks")
    return split_problems(problems, [], names=where, eval_size=eval_size, seed=seed)


def _dataset(name: str, options: Mapping[str, Any], *, size: int, seed: int) -> Any:
    try:
        return reasoning_gym.create_dataset(name, **{"size": size, "seed": seed, **options})
    # Their own, and of the assertions with which options are checked.
    except (ValueError, TypeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or "an option is out of its bounds"
        raise ValueError(f"dataset.tasks: {name}: {reason}") from error
