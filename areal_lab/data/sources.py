"""Load the problems that a configuration names."""

from __future__ import annotations

from areal_lab.config.schema import DatasetConfig
from areal_lab.data.arithmetic import arithmetic_problems
from areal_lab.data.characters import reversed_sums, sorted_digits
from areal_lab.data.jsonl import file_problems
from areal_lab.data.problems import ProblemSet


def load_problems(dataset: DatasetConfig, *, seed: int) -> ProblemSet:
    """Generate or read the problems of a run, split into trained and held-out ones.

    Args:
        seed: the run's seed, for the split and the few-shot lines.

    Raises:
        ValueError: in one line, naming the file and line or the setting and its bounds.
    """
    if dataset.type == "arithmetic":
        return arithmetic_problems(
            operations=dataset.operations,
            digits=dataset.digits,
            few_shot=dataset.few_shot,
            eval_size=dataset.eval_size,
            seed=seed,
        )
    if dataset.type == "reversed_addition":
        return reversed_sums(digits=dataset.digits, eval_size=dataset.eval_size, seed=seed)
    if dataset.type == "sorting":
        return sorted_digits(digits=dataset.digits, eval_size=dataset.eval_size, seed=seed)
    if not dataset.path:
        raise ValueError("dataset.path is empty, but type=jsonl needs a file of problems")
    return file_problems(
        dataset.path,
        prompt_field=dataset.prompt_field,
        answer_field=dataset.answer_field,
        prompt_template=dataset.prompt_template,
        eval_path=dataset.eval_path,
        eval_size=dataset.eval_size,
        seed=seed,
    )
