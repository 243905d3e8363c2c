"""Rows of a data set as text: read or generate them, check them, and split off held-out rows.

    JSONL line, or problem --> Row(prompt, responses) --> RowSet(train, held_out)

A prompt or response is text, or a list of chat messages. This module does not load torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from areal_lab.config.offline import (
    DemonstrationsConfig,
    OfflineDataConfig,
    PairsConfig,
    ScoredPairsConfig,
)
from areal_lab.config.schema import DatasetConfig
from areal_lab.data.jsonl import Message, check_field
from areal_lab.data.problems import Problem, held_out_size
from areal_lab.data.rows import has_field, messages_of, object_rows, read_rows, text_of, value_of
from areal_lab.data.sources import load_problems

Text: TypeAlias = str | tuple[Message, ...]
"""Text, or chat messages."""
ASSISTANT: Final = "assistant"
_MARK: Final = "{prompt}"
_PROMPTS: Final = ("prompt", "question", "input", "instruction", "query", "context_messages")
_RESPONSES: Final = ("completion", "response", "output", "answer", "chosen", "messages")
"""Names of response fields in public data sets, for errors."""


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt with its response, or with a chosen and a rejected one."""

    where: str
    """File and line, for errors."""
    prompt: Text
    """Empty where the responses are whole conversations."""
    responses: tuple[Text, ...]
    margin: float = 0.0
    """Margin by which the chosen response should score higher."""

    @property
    def key(self) -> str:
        """Identity of the prompt: no key is both trained on and held out."""
        prompt, response = self.prompt, self.responses[0]
        if not prompt:  # the messages before the last one, which the conversations share
            prompt = response if isinstance(response, str) else response[:-1]
        return prompt.strip() if isinstance(prompt, str) else json.dumps(prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """Rows to train on, and held-out rows; no prompt is in both."""

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    in_both: int = 0
    """Rows left out of training because their prompts are in the held-out file."""

    @property
    def has_messages(self) -> bool:
        """True if any row has messages; then all rows go through the chat template."""
        return any(
            not isinstance(text, str)
            for rows in (self.train, self.held_out)
            for row in rows
            for text in (row.prompt, *row.responses)
        )

    def digest(self) -> str:
        """Return the SHA-256 of the rows in order, which identifies the data."""
        hashed = hashlib.sha256()
        for rows in (self.train, self.held_out):
            hashed.update(f"{len(rows)}\n".encode())
            for row in rows:
                text = json.dumps([row.prompt, row.responses, row.margin])
                hashed.update(text.encode() + b"\n")
        return hashed.hexdigest()


def load_rows(dataset: OfflineDataConfig, *, seed: int) -> RowSet:
    """Read or generate the rows of a run.

    Args:
        dataset: settings of demonstrations or pairs.
        seed: seed of the run, for the split and for generated rows.

    Raises:
        ValueError: a row or a setting is invalid; the message names the file and line, or the
            setting and its bounds.
    """
    template = dataset.prompt_template
    if template.count(_MARK) != 1:
        raise ValueError(f"prompt_template is {template!r}, but must have {_MARK} once")
    rows = _loaded(dataset, seed)
    if (dataset.chat or rows.has_messages) and (template != _MARK or dataset.end_text):
        name = "end_text" if dataset.end_text else "prompt_template"
        why = "chat is true" if dataset.chat else "rows have messages"
        raise ValueError(
            f"{name} is {getattr(dataset, name)!r}, but {why}, so the model's chat template "
            f"writes the text around them; leave dataset.{name} out"
        )
    return rows


def _loaded(dataset: OfflineDataConfig, seed: int) -> RowSet:
    if dataset.type != "jsonl":
        return _generated(dataset, seed)
    if not dataset.path:
        raise ValueError("path is empty, but type=jsonl needs a file of rows; set dataset.path")
    rows = _read(dataset, dataset.path)
    if dataset.eval_path:
        return _with_eval_file(rows, _read(dataset, dataset.eval_path), dataset, seed)
    return _split(rows, dataset, seed)


def _read(dataset: OfflineDataConfig, path: str) -> list[Row]:
    rows = [row_of(row, where, dataset) for where, row in read_rows(Path(path))]
    if not rows:
        raise ValueError(f"{path} has no rows, but needs at least one")
    return rows


def given_rows(
    dataset: OfflineDataConfig,
    train: object,
    held_out: object,
) -> RowSet:
    """Make the rows that a program passes, in the forms that `object_rows` takes.

    Raises:
        ValueError: a row is invalid; the message names it.
    """
    kept = tuple(row_of(row, at, dataset) for at, row in object_rows(held_out, "valid_dataset"))
    keys = {row.key for row in kept}
    rows = [row_of(row, at, dataset) for at, row in object_rows(train, "train_dataset")]
    if not (rows and kept):
        raise ValueError(f"{'valid' if rows else 'train'}_dataset has no rows, but needs one")
    new = tuple(row for row in rows if row.key not in keys)
    return RowSet(train=new, held_out=kept, in_both=len(rows) - len(new))


def row_of(row: Mapping[str, Any], where: str, dataset: OfflineDataConfig) -> Row:
    """Make the row of a JSON object.

    Args:
        row: the object.
        where: file and line, for errors.
        dataset: names of its fields.

    Raises:
        ValueError: a field is missing, empty or of another type.
    """
    if isinstance(dataset, DemonstrationsConfig):
        if has_field(row, dataset.messages_field):
            messages = messages_of(row, where, dataset.messages_field)
            if all(role != ASSISTANT for role, _ in messages[1:]):
                raise ValueError(
                    f"{where} has no message of the {ASSISTANT} after the first in "
                    f"{dataset.messages_field!r}, but needs one to learn from"
                )
            return Row(where, "", (messages,))
        setting = "dataset.response_field"
        fields = [dataset.response_field]
        needs = f"{dataset.messages_field!r}, or {dataset.prompt_field!r} and {fields[0]!r}"
    else:
        assert isinstance(dataset, PairsConfig), "there are two kinds"
        setting = "dataset.chosen_field"
        fields = [dataset.chosen_field, dataset.rejected_field]
        needs = ", ".join(map(repr, (dataset.prompt_field, *fields)))
    for name in fields:
        check_field(row, where, name, setting, _RESPONSES, needs=needs)
    responses = tuple(_text(row, where, name) for name in fields)
    margin = 0.0
    if isinstance(dataset, ScoredPairsConfig) and dataset.margin_field:
        margin = _number(row, where, dataset.margin_field)
    if not dataset.prompt_field or not has_field(row, dataset.prompt_field):
        if not any(isinstance(one, str) for one in responses):
            return Row(where, "", tuple(map(_conversation(where), responses)), margin)
        if not dataset.prompt_field and len(responses) == 1:
            return Row(where, "", responses)
        if isinstance(dataset, PairsConfig) and (shared := _shared(responses)):
            return Row(where, shared, tuple(one[len(shared) :] for one in responses), margin)
        check_field(row, where, dataset.prompt_field, "dataset.prompt_field", _PROMPTS)
    return Row(where, _text(row, where, dataset.prompt_field), responses, margin)


def _shared(responses: Sequence[Text]) -> str:
    """Return the prompt that two texts both start with, up to a whole word."""
    chosen, rejected = (one if isinstance(one, str) else "" for one in responses)
    if chosen == rejected:
        return ""
    at = next(
        (at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
        min(len(chosen), len(rejected)),
    )
    shared = re.sub(r"\s*\S*$", "", chosen[:at])
    return (
        shared
        if all(isinstance(one, str) and one[len(shared) :].strip() for one in responses)
        else ""
    )


def _conversation(where: str) -> Any:
    def whole(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if len(messages) < 2 or messages[-1][0] != ASSISTANT:
            raise ValueError(
                f"{where} has no prompt, so its conversations must be two or more messages, the "
                f"last one of the {ASSISTANT}"
            )
        return messages

    return whole


def _text(row: Mapping[str, Any], where: str, field: str) -> Text:
    if isinstance(value_of(row, where, field), list | tuple):
        return messages_of(row, where, field)
    text = text_of(row, where, field)
    if not text.strip():
        raise ValueError(f"{where} has an empty {field!r}, but needs text")
    return text


def _number(row: Mapping[str, Any], where: str, field: str) -> float:
    value = value_of(row, where, field)
    try:  # numbers in a CSV file are text
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where} has {value!r:.60} in {field!r}, but needs a finite number")
    return number


# --- the split -----------------------------------------------------------------------------------


def _split(rows: list[Row], dataset: OfflineDataConfig, seed: int) -> RowSet:
    keys = list(dict.fromkeys(row.key for row in rows))
    if len(keys) < 2:
        raise ValueError(
            f"{dataset.path} has {len(keys)} different prompts, but needs at least 2: one to train "
            "on and one to hold out (or set dataset.eval_path)"
        )
    size = held_out_size(len(keys), dataset.eval_size)
    held_out = set(random.Random(f"{seed}/split").sample(keys, size))
    return RowSet(
        train=tuple(row for row in rows if row.key not in held_out),
        held_out=tuple(row for row in rows if row.key in held_out),
    )


def _with_eval_file(
    rows: list[Row], held_out: list[Row], dataset: OfflineDataConfig, seed: int
) -> RowSet:
    size = dataset.eval_size or len(held_out)
    if size > len(held_out):
        raise ValueError(
            f"eval_size is {size}, but {dataset.eval_path} has {len(held_out)} rows; lower it"
        )
    if size < len(held_out):
        held_out = random.Random(f"{seed}/split").sample(held_out, size)
    keys = {row.key for row in held_out}
    train = tuple(row for row in rows if row.key not in keys)
    if not train:
        raise ValueError(
            f"all prompts of {dataset.path} are also in {dataset.eval_path}: none is left to train "
            "on"
        )
    return RowSet(train=train, held_out=tuple(held_out), in_both=len(rows) - len(train))


# --- generated rows ------------------------------------------------------------------------------


def _generated(dataset: OfflineDataConfig, seed: int) -> RowSet:
    shared = {
        name: getattr(dataset, name)
        for name in ("type", "eval_size", "operations", "digits", "few_shot")
    }
    problems = load_problems(DatasetConfig(**shared), seed=seed)
    pairs = isinstance(dataset, PairsConfig)
    space = " " if dataset.type == "arithmetic" else ""

    def rows(of: Sequence[Problem]) -> Iterator[Row]:
        for problem in of:
            answers = [problem.answer]
            if pairs:
                draw = random.Random(f"{seed}/wrong/{problem.prompt}")
                answers.append(_wrong(problem.answer, draw))
            where = f"problem {problem.key!r}"
            yield Row(where, problem.prompt, tuple(f"{space}{one}" for one in answers))

    return RowSet(train=tuple(rows(problems.train)), held_out=tuple(rows(problems.held_out)))


def _wrong(answer: str, draw: random.Random) -> str:
    """Return the answer with one digit changed."""
    places = [at for at, character in enumerate(answer) if character.isdigit()]
    at = draw.choice(places)
    digit = draw.choice([digit for digit in "0123456789" if digit != answer[at]])
    return f"{answer[:at]}{digit}{answer[at + 1 :]}"
