"""Load the problems that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, cast, get_args

from areal_lab.config.schema import BenchmarkName, DatasetConfig
from areal_lab.data.arithmetic import arithmetic_problems
from areal_lab.data.benchmarks import benchmark_problems, is_test
from areal_lab.data.calculator import calculator_problems
from areal_lab.data.chain import chain_problems
from areal_lab.data.characters import reversed_sums, sorted_digits
from areal_lab.data.jsonl import file_problems, split_problems
from areal_lab.data.numbered import numbered_problems
from areal_lab.data.problems import ProblemSet
from areal_lab.data.rendered import rendered_sums
from areal_lab.extras import MissingExtra


def load_problems(dataset: DatasetConfig, *, seed: int) -> ProblemSet:
    """Generate or read the problems of a run, split into trained and held-out ones.

    Args:
        seed: the run's seed, for the split and the few-shot lines.

    Raises:
        ValueError: in one line, naming the file and line or the setting and its bounds.
    """
    if (generate := _GENERATED.get(dataset.type)) is not None:
        return generate(dataset, seed)
    if not dataset.path:
        raise ValueError(f"dataset.path is empty, but type={dataset.type} needs a file of problems")
    if dataset.type in get_args(BenchmarkName):
        return _of_benchmark(dataset, cast("BenchmarkName", dataset.type), seed)
    return file_problems(
        dataset.path,
        prompt_field=dataset.prompt_field,
        answer_field=dataset.answer_field,
        image_field=dataset.image_field,
        prompt_template=dataset.prompt_template,
        eval_path=dataset.eval_path,
        eval_size=dataset.eval_size,
        seed=seed,
    )


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
    "numbered": _numbered,
    "rendered_sums": lambda dataset, seed: rendered_sums(
        size=dataset.size, eval_size=dataset.eval_size, seed=seed
    ),
    "reasoning_gym": _of_reasoning_gym,
}
"""Sources that read no file."""
