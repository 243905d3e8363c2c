"""Problems from files: JSON lines, such as GSM8K's, and formats that `datasets` reads.

JSON lines are read here so that errors name the line, and because importing `datasets` takes 2 s
and 140 MB. Parquet, CSV, Arrow and folders of `save_to_disk` are read by `datasets`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_lab.data.images import EncodedImage, image_of_value
from areal_lab.data.problems import Problem, ProblemSet, held_out_size

_JSON_LINES = {".jsonl", ".json", ".ndjson", ""}
_BY_DATASETS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}

_GSM8K_MARK = "####"
_SHOWN_CHARACTERS = 60


def file_problems(
    path: str | Path,
    *,
    prompt_field: str = "question",
    answer_field: str = "answer",
    image_field: str = "",
    prompt_template: str = "{prompt}",
    eval_path: str | Path = "",
    eval_size: int = 0,
    seed: int = 1,
) -> ProblemSet:
    """Problems of a file; the held-out ones are another file, or a random part of this one.

    Problems with the same prompt stay in the same part. With `eval_path`, prompts held out there
    are removed from training, and `eval_size` takes a random part of that file (0 takes all).

    Args:
        image_field: field with the image of a problem, or a list of them; empty: there are none.
        prompt_template: text around the problem; `{prompt}` is replaced, other braces are kept.

    Raises:
        ValueError: in one line, with file, line and field.
    """
    if "{prompt}" not in prompt_template:
        raise ValueError(f"prompt_template is {prompt_template!r}, but must contain {{prompt}}")
    fields = (prompt_field, answer_field, prompt_template)
    problems = read_problems(path, *fields, image_field=image_field)
    held_out = read_problems(eval_path, *fields, image_field=image_field) if eval_path else []
    names = (str(path), str(eval_path))
    return split_problems(problems, held_out, names=names, eval_size=eval_size, seed=seed)


def split_problems(
    problems: list[Problem],
    held_out: list[Problem],
    *,
    names: tuple[str, str],
    eval_size: int,
    seed: int,
) -> ProblemSet:
    """Split problems as `file_problems` does.

    Args:
        held_out: of another file; empty holds out some of `problems`.
        names: of the two files, for errors.

    Raises:
        ValueError: in one line; there are too few problems.
    """
    path, eval_path = names
    rng = random.Random(f"{seed}/split")
    if held_out:
        size = eval_size or len(held_out)
        if not 0 < size <= len(held_out):
            raise ValueError(
                f"eval_size is {eval_size}, but {eval_path} has {len(held_out)} problems"
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
    path: str | Path,
    prompt_field: str,
    answer_field: str,
    prompt_template: str = "{prompt}",
    *,
    image_field: str = "",
) -> list[Problem]:
    """All problems of a file, in order.

    Raises:
        ValueError: in one line, with file, line and field.
    """
    problems = [
        problem_of_row(
            row,
            where,
            prompt_field,
            answer_field,
            prompt_template,
            images=images_of_row(row, where, image_field, Path(path).parent),
        )
        for where, row in read_rows(Path(path))
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


def read_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row with its place, such as `train.jsonl, line 12`.

    Raises:
        ValueError: in one line, with file and line.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist (paths are relative to {Path.cwd()})")
    if path.is_dir() or path.suffix in _BY_DATASETS:
        yield from _rows_by_datasets(path)
    elif path.suffix in _JSON_LINES:
        try:
            with path.open("rb") as file:
                yield from _json_lines(path, file)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    else:
        known = ", ".join(sorted({*_JSON_LINES, *_BY_DATASETS} - {""}))
        raise ValueError(f"{path} has an unknown extension; known are {known}")


def _json_lines(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where} is not JSON: {error.msg} at column {error.colno}: {_shown(line)}"
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not UTF-8 at byte {error.start + 1}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} is not a JSON object: {_shown(line)}")
        yield where, row


def _rows_by_datasets(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import datasets

    try:
        if path.is_dir():
            table = datasets.load_from_disk(str(path))
        else:
            table = datasets.load_dataset(
                _BY_DATASETS[path.suffix], data_files=str(path), split="train"
            )
    except Exception as error:  # each format's reader raises its own errors
        reason = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
        raise ValueError(f"datasets cannot read {path}: {reason}") from error
    if isinstance(table, dict):
        raise ValueError(
            f"{path} holds several splits ({', '.join(table)}); name the folder of one of them"
        )
    for number, row in enumerate(table, start=1):
        yield f"{path}, row {number}", row


def images_of_row(
    row: Mapping[str, Any], where: str, field: str, folder: Path
) -> tuple[str, tuple[EncodedImage, ...]]:
    """The images of one row, after the name of their field.

    Args:
        where: file and line, for errors.
        field: has an image, a list of them, or null; empty: there are none.
        folder: that paths of images are relative to.

    Raises:
        ValueError: in one line, if the field is missing or an image cannot be read.
    """
    if not field:
        return field, ()
    if field not in row:
        raise ValueError(f"{where} has no field {field!r}; it has {', '.join(map(repr, row))}")
    value = row[field]
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return field, tuple(image_of_value(one, where, folder) for one in values)


def problem_of_row(
    row: Mapping[str, Any],
    where: str,
    prompt_field: str,
    answer_field: str,
    template: str,
    *,
    images: tuple[str, tuple[EncodedImage, ...]] = ("", ()),
) -> Problem:
    """The problem of one row.

    Args:
        where: file and line, for errors.
        images: of `images_of_row`; their field is left out of what a reward function gets.

    Raises:
        ValueError: in one line, if a field is missing or is no text.
    """
    prompt = text_of(row, where, prompt_field)
    answer = text_of(row, where, answer_field)
    if not prompt.strip():
        raise ValueError(f"{where} has an empty {prompt_field!r}")
    field, pictures = images
    others = {name: value for name, value in row.items() if name != field}
    return Problem(
        prompt=template.replace("{prompt}", prompt),
        answer=gold_answer(answer),
        key=" ".join((prompt.strip(), *(image.digest for image in pictures))),
        metadata={**others, "full_answer": answer},
        images=pictures,
    )


def text_of(row: Mapping[str, Any], where: str, field: str) -> str:
    """The text, or number as text, of a field.

    Raises:
        ValueError: in one line, if the field is missing or neither.
    """
    if field not in row:
        raise ValueError(f"{where} has no field {field!r}; it has {', '.join(map(repr, row))}")
    value = row[field]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(
            f"{where} has {type(value).__name__} in {field!r}, but must have text or a number"
        )
    return str(value)


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
