"""Problems of rows: prompt and gold answer by the names of their fields, as text or messages.

    row of GSM8K     question, answer                        Problem(prompt, answer)
    row of verl      prompt (messages), reward_model.ground_truth

Messages are rendered by the model's chat template, which the caller passes as a function.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from areal_lab.config.schema import DatasetConfig
from areal_lab.data.images import EncodedImage, image_of_value
from areal_lab.data.problems import Problem, ProblemSet, held_out_size
from areal_lab.data.rows import has_field, messages_of, read_rows, text_of, value_of

Message: TypeAlias = tuple[str, str]
"""Role and content."""
Render: TypeAlias = Callable[[Sequence[Message]], str]
"""Render messages up to the start of the assistant's message; raises ValueError."""

_GSM8K_MARK = "####"
_PROMPTS: Final = (
    *("question", "prompt", "problem", "instruction", "input", "query", "context_messages"),
    "messages",
)
_ANSWERS: Final = (
    *("answer", "reward_model.ground_truth", "ground_truth", "final_answer", "expected_answer"),
    *("label", "target", "solution", "output", "response", "completion"),
)
"""Common field names of data sets, for error messages."""


def file_problems(
    dataset: DatasetConfig, *, seed: int = 1, render: Render | None = None
) -> ProblemSet:
    """Problems of `dataset.path`; the held-out ones are another file, or a random part of this one.

    Problems with the same prompt stay in the same part. With `eval_path`, prompts held out there
    are removed from training, and `eval_size` takes a random part of that file (0 takes all).
    """
    template = dataset.prompt_template
    if "{prompt}" not in template:
        raise ValueError(f"prompt_template is {template!r}, but must contain {{prompt}}")
    return split_problems(
        read_problems(dataset.path, dataset, render),
        read_problems(dataset.eval_path, dataset, render) if dataset.eval_path else [],
        names=(dataset.path, dataset.eval_path),
        eval_size=dataset.eval_size,
        seed=seed,
    )


def split_problems(
    problems: list[Problem],
    held_out: list[Problem],
    *,
    names: tuple[str, str],
    eval_size: int,
    seed: int,
) -> ProblemSet:
    """Split problems as `file_problems` does; an empty `held_out` holds out some of `problems`."""
    path, eval_path = names
    rng = random.Random(f"{seed}/split")
    if held_out:
        size = eval_size or len(held_out)
        if not 0 < size <= len(held_out):
            raise ValueError(
                f"dataset.eval_size is {eval_size}, but {eval_path} has {len(held_out)} problems; "
                "lower it, or set 0 for all of them"
            )
        held_out = rng.sample(held_out, size) if size < len(held_out) else held_out
        keys = {problem.key for problem in held_out}
    else:
        keys_of_all = list(dict.fromkeys(problem.key for problem in problems))
        if len(keys_of_all) < 2:
            raise ValueError(
                f"{path} has {len(keys_of_all)} different problems, but needs at least 2: "
                "at least one to train on and one to hold out (or set dataset.eval_path)"
            )
        keys = set(rng.sample(keys_of_all, held_out_size(len(keys_of_all), eval_size)))
        held_out = [problem for problem in problems if problem.key in keys]
    train = [problem for problem in problems if problem.key not in keys]
    if not train:
        raise ValueError(
            f"all problems of {path} are also in {eval_path}: none is left to train on"
        )
    return ProblemSet(train=tuple(train), held_out=tuple(held_out))


def read_problems(
    path: str | Path, dataset: DatasetConfig, render: Render | None = None
) -> list[Problem]:
    """All problems of a file, in order; `dataset` names their fields."""
    folder = Path(path).parent
    problems = [
        problem_of_row(row, where, dataset, folder, render) for where, row in read_rows(Path(path))
    ]
    if not problems:
        raise ValueError(f"{path} has no problems, but needs at least one")
    return problems


def gold_answer(answer: str) -> str:
    """The text after GSM8K's `####`, without thousands separators; without the mark, the answer.

    >>> gold_answer("She has 4 * 300 = 1200 left.\\n#### 1,200")
    '1200'
    """
    if _GSM8K_MARK not in answer:
        return answer.strip()
    return answer.rsplit(_GSM8K_MARK, 1)[1].strip().replace(",", "")


def problem_of_row(
    row: Mapping[str, Any],
    where: str,
    dataset: DatasetConfig,
    folder: Path,
    render: Render | None = None,
) -> Problem:
    """Create the problem of one row.

    Args:
        dataset: names its fields. The one with images is left out of what a reward function gets.
        folder: that image files may be in, in addition to `dataset.image_folder`.
        render: writes a prompt that is messages, which stay in the metadata as `messages`.
    """
    pictures = _images(row, where, dataset, folder)
    prompt_field, answer_field = dataset.prompt_field, dataset.answer_field
    check_field(row, where, prompt_field, "dataset.prompt_field", _PROMPTS)
    others = {name: value for name, value in row.items() if name != dataset.image_field}
    is_chat = isinstance(value_of(row, where, prompt_field), list | tuple)
    if is_chat:
        messages = messages_of(row, where, prompt_field)
        prompt, asked = _rendered(messages, where, dataset, render), messages[-1][1]
        given = [{"role": role, "content": content} for role, content in messages]
        others = {"messages": given, **others}
        key = json.dumps(messages)
    else:
        key = asked = text_of(row, where, prompt_field)
        prompt = dataset.prompt_template.replace("{prompt}", asked)
    if not asked.strip():
        raise ValueError(f"{where} has an empty {prompt_field!r}")
    answer = ""
    if answer_field:
        check_field(row, where, answer_field, "dataset.answer_field", _ANSWERS)
        answer = text_of(row, where, answer_field)
    return Problem(
        prompt=prompt,
        answer=gold_answer(answer),
        key=" ".join((key.strip(), *(image.digest for image in pictures))),
        metadata={**others, "full_answer": answer},
        images=pictures,
        rendered=is_chat,
    )


def _images(
    row: Mapping[str, Any], where: str, dataset: DatasetConfig, folder: Path
) -> tuple[EncodedImage, ...]:
    """The images of one row: its field has an image, a list of them, or null."""
    if not dataset.image_field:
        return ()
    value = value_of(row, where, dataset.image_field)
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple(image_of_value(one, where, folder, dataset.image_folder) for one in values)


def check_field(
    row: Mapping[str, Any],
    where: str,
    field: str,
    setting: str,
    names: Sequence[str],
    *,
    needs: str = "",
) -> None:
    """Reject a row without a field, with a suggestion of a similar field."""
    try:
        value_of(row, where, field)
    except ValueError as error:
        meant = next((name for name in names if has_field(row, name)), None)
        fix = f"{setting}={meant}" if meant else f"{setting} to one of them"
        raise ValueError(f"{error}{needs and f', but needs {needs}'}; set {fix}") from error


def _rendered(
    messages: Sequence[Message], where: str, dataset: DatasetConfig, render: Render | None
) -> str:
    field, template = dataset.prompt_field, dataset.prompt_template
    if template != "{prompt}":
        raise ValueError(
            f"{where} has messages in {field!r}, around which the model's chat template writes, "
            f"but prompt_template is {template!r}; leave dataset.prompt_template out"
        )
    if messages[-1][0] == "assistant":
        raise ValueError(
            f"{where} has a message of the assistant at the end of {field!r}, but a prompt ends "
            "where the assistant begins to speak; leave that message out"
        )
    if render is None:
        raise ValueError(
            f"{where} has messages in {field!r}, which a chat template has to write, but no model "
            "is known here; give text"
        )
    try:
        return render(messages)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
