"""Rows as tokens: each an item of one or two examples, none cut off.

Row --> pieces of text --> tokens, spans to learn --> Example --> Trajectory of a batch
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from areal_lab.config.offline import OfflineDataConfig
from areal_lab.config.problem import refusal
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import Observation, Segment, Trajectory
from areal_lab.data.wrapping import Wrapping
from areal_lab.models.folder import end_token_ids, read_model_facts
from areal_lab.offline.chat import Render, chat_renderer, chat_wrapping, conversation, pieces
from areal_lab.offline.rows import Row, Text

Learn = Literal["responses", "everything", "score"]
"""Tokens that are predicted: the responses, all but the first, or none: one number at the end."""


class Span(NamedTuple):
    """Tokens that are learned, from `start` up to, not including, `end`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Example:
    """The tokens of one sequence."""

    tokens: array[int]
    learned: tuple[Span, ...]
    """In order; empty for a sequence that is scored at its end."""

    def trajectory(self, group: int, sample: int) -> Trajectory:
        """The sequence as a trajectory of a batch.

        What is scored gets one token more, whose value is read before it, at the last token.
        """
        spans = self.learned or (Span(len(self.tokens), len(self.tokens) + 1),)
        tokens = tuple(self.tokens) if self.learned else (*self.tokens, 0)
        parts: list[Segment | Observation] = []
        at = spans[0].start
        for start, end in spans:
            if start > at:
                parts.append(Observation(tokens[at:start]))
            parts.append(Segment(tokens[start:end], (0.0,) * (end - start), 0))
            at = end
        return Trajectory(
            group=group,
            sample=sample,
            prompt_tokens=tokens[: spans[0].start],
            parts=tuple(parts),
            finish_reason="stop",
            reward=0.0,
        )


class Item(NamedTuple):
    """What a batch counts as one: an example, or a chosen and a rejected one."""

    examples: tuple[Example, ...]
    margin: float


@dataclass(slots=True)
class Items:
    """Items in the order of their rows, and why others were left out."""

    items: list[Item]
    dropped: Counter[str] = field(default_factory=Counter[str])


def trajectories(items: Sequence[Item]) -> list[Trajectory]:
    """The sequences of a batch; the examples of item n are group n."""
    return [
        example.trajectory(group, sample)
        for group, item in enumerate(items)
        for sample, example in enumerate(item.examples)
    ]


class Encoder:
    """Makes items of rows, by the tokenizer and the template of a model.

    Args:
        folder: of the model.
        dataset: what stands around prompts and responses, and how long rows may be.
        learn: which tokens.
        chat: whether any row has messages; then all rows go through the chat template.

    Raises:
        ConfigError: the model has no tokenizer, no chat template or no end token, and needs one.
    """

    def __init__(
        self, folder: Path, dataset: OfflineDataConfig, learn: Learn, *, chat: bool = False
    ) -> None:
        self._dataset = dataset
        self._learn = learn
        self._render: Render | None = None
        try:
            self.codec = TextCodec.load(folder)
            context = read_model_facts(folder).context_tokens
            self.wrapping = Wrapping()
            if dataset.chat or chat:
                self._render = chat_renderer(folder)
                if learn == "score":
                    self.wrapping = chat_wrapping(self._render)
        except ValueError as error:
            raise refusal("dataset", f"dataset: {error}") from error
        self.limit = min((n for n in (dataset.max_tokens, context) if n), default=None)
        if self._render is None:
            prefix, suffix = dataset.prompt_template.split("{prompt}")
            self.wrapping = Wrapping(
                prefix=prefix,
                suffix=suffix,
                end_text=dataset.end_text,
                end_token=_end_token(folder, self.codec) if dataset.end_token else None,
            )

    def items(self, rows: Iterable[Row]) -> Items:
        """The items of the rows.

        Raises:
            ConfigError: a row is too long, or has no token to learn; in one line.
        """
        rows = list(rows)
        texts = [[self._pieces(row, response) for response in row.responses] for row in rows]
        tokens = iter(self._encoded([one for of_row in texts for one in of_row]))
        found = Items([])
        too_long: list[tuple[int, Row]] = []
        for row, of_row in zip(rows, texts, strict=True):
            examples = tuple(self._example(row, next(tokens)) for _ in of_row)
            longest = max(len(example.tokens) for example in examples)
            if self.limit is not None and longest > self.limit:
                too_long.append((longest, row))
            elif len(examples) > 1 and examples[0].tokens == examples[1].tokens:
                found.dropped["chosen and rejected are equal"] += 1
            else:
                found.items.append(Item(examples, row.margin))
        if too_long and self._dataset.too_long == "refuse":
            worst, row = max(too_long, key=lambda one: one[0])
            raise refusal(
                "dataset.max_tokens",
                f"{row.where} has {worst} tokens, but a row may have at most {self.limit} "
                f"(dataset.max_tokens, or the model's context); {len(too_long)} of {len(rows)} "
                "rows are too long: raise dataset.max_tokens if the model allows it, or leave "
                "them out with dataset.too_long=drop",
            )
        if too_long:
            found.dropped[f"longer than {self.limit} tokens"] += len(too_long)
        return found

    def _pieces(self, row: Row, response: Text) -> list[tuple[str, bool]]:
        """Text in order, each with whether it is a response."""
        if self._render is None:
            assert isinstance(row.prompt, str), "messages need a chat template"
            rule = self.wrapping
            return [(rule.prompt(row.prompt), False), (f"{response}{rule.end_text}", True)]
        try:
            found = pieces(conversation(row, response), self._render, row.where)
        except ValueError as error:
            raise refusal("dataset", f"dataset: {error}") from error
        return found

    def _encoded(self, sequences: list[list[tuple[str, bool]]]) -> list[tuple[list[int], Any]]:
        """Tokens of each sequence, with the spans of its responses; all texts in two calls."""
        begins = self._render is None
        first = self.codec.encode_all([texts[0][0] for texts in sequences], begins=begins)
        rest = iter(
            self.codec.encode_all(
                [text for texts in sequences for text, _ in texts[1:]], begins=False
            )
        )
        encoded = []
        for texts, head in zip(sequences, first, strict=True):
            tokens, spans = list(head), []
            for at, (_, said) in enumerate(texts[1:], start=2):
                start = len(tokens)
                tokens += next(rest)
                if at == len(texts):
                    tokens += self.wrapping.end if begins else ()
                if said and len(tokens) > start:
                    spans.append(Span(start, len(tokens)))
            encoded.append((tokens, spans))
        return encoded

    def _example(self, row: Row, encoded: tuple[list[int], list[Span]]) -> Example:
        tokens, spans = encoded
        if not spans or not spans[0].start:
            what = "a prompt" if spans else "a response"
            raise refusal(
                "dataset",
                f"{row.where} has {what} without tokens, but the first token of a response "
                "follows one: fill it in, or set dataset.prompt_template or dataset.end_token",
            )
        if self._learn == "everything":
            spans = [Span(1, len(tokens))]
        return Example(array("i", tokens), () if self._learn == "score" else tuple(spans))


def _end_token(folder: Path, codec: TextCodec) -> int:
    """The token that ends a response: the tokenizer's, else the only one of the model."""
    file = folder / "tokenizer_config.json"
    named = json.loads(file.read_text(encoding="utf-8")).get("eos_token") if file.is_file() else ""
    name = named.get("content", "") if isinstance(named, dict) else named or ""
    token = codec.token(name) if name else None
    if token is not None:
        return token
    ends = end_token_ids(folder)
    if len(ends) == 1:
        return next(iter(ends))
    raise refusal(
        "dataset.end_token",
        f"dataset.end_token is true, but {folder} does not name its end token (eos_token in "
        "tokenizer_config.json); set dataset.end_token=false, and dataset.end_text",
    )
