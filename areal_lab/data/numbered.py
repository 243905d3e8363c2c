"""Problems that are numbers, for environments that make what they ask from a seed."""

from __future__ import annotations

from areal_lab.data.problems import Problem, ProblemSet, held_out_size


def numbered_problems(*, size: int, prompt_template: str, eval_size: int = 0) -> ProblemSet:
    """Problems 0 to `size - 1`, each with its number as `seed`; the last ones are held out.

    Args:
        size: of all problems, at least 2.
        prompt_template: text of each prompt, the same for all; `{prompt}` is replaced by the
            number, from which a model may learn what the environment made of it.
        eval_size: held-out problems. 0 uses the default of `held_out_size`.

    Raises:
        ValueError: naming the setting and its bounds.
    """
    if size < 2:
        raise ValueError(f"dataset.size is {size}, but must be >= 2: one is held out")
    if prompt_template in ("", "{prompt}"):
        raise ValueError(
            f"dataset.prompt_template is {prompt_template!r}, but type=numbered has no text, and "
            "its numbers may tell the solution; write what samples begin with, as 'Let us play. '"
        )
    problems = [
        Problem(
            prompt=prompt_template.replace("{prompt}", str(number)),
            answer="",
            key=str(number),
            metadata={"seed": number},
        )
        for number in range(size)
    ]
    train = size - held_out_size(size, eval_size)
    return ProblemSet(train=tuple(problems[:train]), held_out=tuple(problems[train:]))
