"""Load the problems that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final, cast, get_args

from areal_lab.config.schema import BenchmarkName, DatasetConfig
from areal_lab.data.arithmetic import arithmetic_problems, calculator_problems
from areal_lab.data.benchmarks import benchmark_problems, is_test
from areal_lab.data.chain import chain_problems
from areal_lab.data.jsonl import (
    Render,
    file_problems,
    problem_of_row,
    split_problems,
)
from areal_lab.data.problems import Problem, ProblemSet, numbered_problems
from areal_lab.data.rows import object_rows
from areal_lab.data.small_tasks import rendered_sums, reversed_sums, sorted_digits
from areal_lab.extras import MissingExtra


def load_problems(dataset: DatasetConfig, *, seed: int, render: Render | None = None) -> ProblemSet:
    """Generate or read the problems of a run, split into trained and held-out ones.

    `render` converts prompts that are messages; `resolve.problems` has the one of a model.
    """
    if (generate := _GENERATED.get(dataset.type)) is not None:
        return generate(dataset, seed)
    if not dataset.path:
        raise ValueError(f"dataset.path is empty, but type={dataset.type} needs a file of problems")
    if dataset.type in get_args(BenchmarkName):
        return _of_benchmark(dataset, cast("BenchmarkName", dataset.type), seed)
    return file_problems(dataset, seed=seed, render=render)


def given_problems(
    data: object, dataset: DatasetConfig, *, seed: int, render: Render | None = None
) -> ProblemSet:
    """Problems that a program passes instead of `dataset`.

    `data` is a `ProblemSet`; problems, or rows with the fields that `dataset` names, in any form of
    `object_rows`; the path of a file, a pattern or a folder; or two of these, one to train on and
    one to hold out, by the names of a `DatasetDict` or as a pair.
    """
    if isinstance(data, ProblemSet):
        return data
    train, held_out = _parts(data)
    problems = given_list(train, "problems", dataset, render)
    kept = [] if held_out is None else given_list(held_out, "held-out problems", dataset, render)
    return split_problems(
        problems,
        kept,
        names=("problems", "the held-out data"),
        eval_size=dataset.eval_size,
        seed=seed,
    )


_HELD_OUT: Final = ("test", "validation", "valid", "val", "eval", "held_out")


def _parts(data: Any) -> tuple[object, object | None]:
    """Training part and held-out part; None if the latter is a part of the first."""
    if isinstance(data, Mapping) and "train" in data:
        named = [name for name in _HELD_OUT if name in data]
        if left := [name for name in data if name not in ("train", *named[:1])]:
            raise ValueError(
                f"problems has {', '.join(map(repr, data))}, but must have 'train' and one part to "
                f"hold out; leave out {', '.join(map(repr, left))}"
            )
        return data["train"], data[named[0]] if named else None
    if isinstance(data, tuple) and len(data) == _PAIR and not any(_is_row(one) for one in data):
        return data
    return data, None


_PAIR: Final = len(("train", "held_out"))


def _is_row(one: object) -> bool:
    return isinstance(one, Problem) or (
        isinstance(one, Mapping) and not any(isinstance(v, list) for v in one.values())
    )


def given_list(
    data: Any, name: str, dataset: DatasetConfig, render: Render | None = None
) -> list[Problem]:
    """Problems of one part from a program, in order."""
    if isinstance(data, Problem):
        raise ValueError(f"{name} is one Problem, but must be a list of them")
    folder = Path(data).parent if isinstance(data, str | PathLike) else Path()
    problems = [
        row if isinstance(row, Problem) else problem_of_row(row, where, dataset, folder, render)
        for where, row in object_rows(data, name, kept=Problem)
    ]
    if not problems:
        raise ValueError(f"{name} has no rows, but needs at least one")
    return problems


def _of_reasoning_gym(dataset: DatasetConfig, seed: int) -> ProblemSet:
    try:
        from areal_lab.data.reasoning_gym import reasoning_problems  # its package is an extra
    except MissingExtra as error:
        raise ValueError(f"dataset.type={dataset.type}: {error}") from error
    return reasoning_problems(
        dataset.tasks,
        size=dataset.size,
        seed=seed,
        prompt_template=dataset.prompt_template,
        eval_size=dataset.eval_size,
    )


def _of_benchmark(dataset: DatasetConfig, name: BenchmarkName, seed: int) -> ProblemSet:
    problems = benchmark_problems(name, dataset.path, dataset.prompt_template)
    if dataset.eval_path:
        held_out = benchmark_problems(name, dataset.eval_path, dataset.prompt_template)
    else:
        # MBPP is one file, whose test split is a range of tasks.
        held_out = [problem for problem in problems if is_test(name, problem)]
        held_out = [] if len(held_out) == len(problems) else held_out
    names = (dataset.path, dataset.eval_path or f"{dataset.path} (test split)")
    size = dataset.eval_size
    return split_problems(problems, held_out, names=names, eval_size=size, seed=seed)


def _arithmetic(dataset: DatasetConfig, seed: int) -> ProblemSet:
    return arithmetic_problems(
        operations=dataset.operations,
        digits=dataset.digits,
        carry=dataset.carry,
        few_shot=dataset.few_shot,
        eval_size=dataset.eval_size,
        seed=seed,
    )


def _of_environment(dataset: DatasetConfig, seed: int) -> ProblemSet:
    del dataset, seed
    raise ValueError("dataset.type=environment needs the settings of `environment` (run_problems)")


def _numbered(dataset: DatasetConfig, seed: int) -> ProblemSet:
    del seed  # each problem has its own
    return numbered_problems(
        size=dataset.size, prompt_template=dataset.prompt_template, eval_size=dataset.eval_size
    )


_GENERATED: Final[Mapping[str, Callable[[DatasetConfig, int], ProblemSet]]] = {
    "arithmetic": _arithmetic,
    "calculator": lambda dataset, seed: calculator_problems(
        examples=dataset.tool_examples,
        notation=dataset.tool_notation,
        eval_size=dataset.eval_size,
        seed=seed,
    ),
    "chain": lambda dataset, seed: chain_problems(
        dataset.size,
        depth=dataset.depth,
        examples=dataset.few_shot,
        eval_size=dataset.eval_size,
        seed=seed,
    ),
    "reversed_addition": lambda dataset, seed: reversed_sums(
        digits=dataset.digits, eval_size=dataset.eval_size, seed=seed
    ),
    "sorting": lambda dataset, seed: sorted_digits(
        digits=dataset.digits, eval_size=dataset.eval_size, seed=seed
    ),
    "environment": _of_environment,
    "numbered": _numbered,
    "rendered_sums": lambda dataset, seed: rendered_sums(
        size=dataset.size, eval_size=dataset.eval_size, seed=seed
    ),
    "reasoning_gym": _of_reasoning_gym,
}
"""Sources without a file."""
