"""Problems that Reasoning Gym generates: `dataset.type=reasoning_gym`.

Needs `pip install 'areal_lab[reasoning-gym]'`. Answers are scored by the task itself, with
`reward.fn=areal_lab.rewards.reasoning_gym:ReasoningGym`.

    reasoning_problems --tasks--> a process with PYTHONHASHSEED=0 --entries--> Problem

Some tasks take items of sets in their order, which changes with the hash seed of the process, and
`list_functions` takes Python's global random numbers: a resumed run would train on other problems,
and held-out ones would move. So the process has a fixed hash seed and seeds the global numbers.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from areal_lab.data.jsonl import split_problems
from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.extras import require
from areal_lab.host.processes import inherited_environment

require("areal_lab.data.reasoning_gym", "reasoning-gym")

LEFT_OUT: Final[Mapping[str, str]] = {
    "coin_flip": "its score pays the share of equal first digits, so that 0 gets 0.95 "
    "(reasoning-gym 0.1.25)",
    "composite": "it is a mix of tasks; name its tasks in dataset.tasks, which mixes them",
    "game_of_life": "its score pays the share of equal cells, so that an empty board gets 0.96 "
    "(reasoning-gym 0.1.25)",
    "game_of_life_halting": "its score accepts any text (reasoning-gym 0.1.25)",
    "puzzle24": "its score does not compare the numbers with those of the problem, so that one "
    "answer solves all (reasoning-gym 0.1.25)",
}
"""Tasks that are refused, with the reason. docs/environments_checked.md has what was checked."""


def reasoning_problems(
    tasks: Mapping[str, Mapping[str, Any]],
    *,
    size: int,
    seed: int,
    prompt_template: str = "{prompt}",
    eval_size: int = 0,
) -> ProblemSet:
    """Problems of some tasks, mixed and split; equal questions stay together."""
    if not tasks:
        raise ValueError("dataset.tasks is empty, but must name a task, as {leg_counting: {}}")
    for name in tasks:
        if name in LEFT_OUT:
            raise ValueError(f"dataset.tasks: {name} is refused: {LEFT_OUT[name]}")
    problems: list[Problem] = []
    for name, entries in generated_entries(tasks, size=size, seed=seed).items():
        for entry in entries:
            problems.append(
                Problem(
                    prompt=prompt_template.replace("{prompt}", str(entry["question"])),
                    answer="" if entry["answer"] is None else str(entry["answer"]),
                    key=f"{name}: {entry['question']}",
                    metadata={"task": name, "options": dict(tasks[name] or {}), "entry": entry},
                )
            )
    where = ("dataset.tasks", "dataset.tasks")
    return split_problems(problems, [], names=where, eval_size=eval_size, seed=seed)


def generated_entries(
    tasks: Mapping[str, Mapping[str, Any]], *, size: int, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """Entries of each task, from a process with a fixed hash seed."""
    wanted = {name: {"size": size, "seed": seed, **(given or {})} for name, given in tasks.items()}
    made: dict[str, list[dict[str, Any]]] = pickle.loads(_pickled(json.dumps(wanted)))
    return made


@lru_cache(maxsize=4)
def _pickled(wanted: str) -> bytes:
    """Entries as a pickle; a run loads its problems more than once, and a process takes seconds."""
    environment = {
        **inherited_environment(),
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    ended = subprocess.run(
        [sys.executable, "-m", "areal_lab.data.reasoning_gym"],
        input=wanted.encode(), capture_output=True, check=False, env=environment,
    )  # fmt: skip
    if ended.returncode != 0:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"its process ended with {ended.returncode}"
        raise ValueError(f"dataset.tasks: {reason}")
    return ended.stdout


def _entries(name: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    import numpy
    import reasoning_gym

    seed = f"{name}/{options['seed']}".encode()
    random.seed(seed)
    numpy.random.seed(zlib.crc32(seed))
    try:
        yield from reasoning_gym.create_dataset(name, **options)
    # Their own errors, and those of assertions that check options.
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or "an option is out of its bounds"
        raise ValueError(f"{name}: {reason}") from error


def _main() -> int:
    """Read tasks as JSON, and write their entries as a pickle."""
    # Only the pickle goes to the pipe; generators print.
    output = os.dup(1)
    os.dup2(2, 1)
    wanted = json.load(sys.stdin)
    try:
        made = {name: [*_entries(name, options)] for name, options in wanted.items()}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    with open(output, "wb") as pipe:
        pickle.dump(made, pipe)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
