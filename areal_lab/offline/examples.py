"""Tokens of rows: apply the chat template, and make items of one or two examples.

The chat template turns a conversation into pieces of text, which alternate between prompts and
responses of the assistant:

    user: hi, assistant: hello   -->   "<|user|>hi<|assistant|>" | "hello<|end|>"

Each piece is tokenized separately, as in generation, where the response does not exist yet when the
prompt is tokenized.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from areal_lab.agents.template import TemplateRefusal, load_template
from areal_lab.config.offline import OfflineConfig, OfflineDataConfig, RewardModelConfig, SFTConfig
from areal_lab.config.problem import refusal
from areal_lab.data.jsonl import Message
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import Observation, Segment, Trajectory
from areal_lab.data.wrapping import Wrapping
from areal_lab.models.files import read_object
from areal_lab.models.folder import end_token_ids, read_model_facts
from areal_lab.offline.rows import ASSISTANT, Row, RowSet, Text

Learn = Literal["responses", "everything", "score"]
"""Tokens to learn: those of responses, all but the first one, or none (a score at the end)."""


class Span(NamedTuple):
    """Range of learned tokens from `start` to `end`, without `end`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens of one sequence."""

    tokens: array[int]
    learned: tuple[Span, ...]
    """Spans in order; empty for a sequence that is scored at its end."""

    def trajectory(self, group: int, sample: int) -> Trajectory:
        """Return the sequence as a trajectory of a batch.

        A scored sequence gets an extra token at its end, because values are read one token before
        the learned one.
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
    """Unit of a batch: one example, or a pair of a chosen and a rejected one."""

    examples: tuple[Example, ...]
    margin: float


@dataclass(slots=True)
class Items:
    """Items in the order of their rows, and counts of dropped rows by reason."""

    items: list[Item]
    dropped: Counter[str] = field(default_factory=Counter[str])


def trajectories(items: Sequence[Item]) -> list[Trajectory]:
    """Return the sequences of a batch; the examples of item n are group n."""
    return [
        example.trajectory(group, sample)
        for group, item in enumerate(items)
        for sample, example in enumerate(item.examples)
    ]


class Encoder:
    """Encoder of rows with the tokenizer and the chat template of a model.

    Args:
        folder: folder of the model.
        dataset: template of prompts, end of responses and maximum length of rows.
        learn: tokens to learn.
        chat: rows have messages, so all rows go through the chat template.

    Raises:
        ConfigError: the model lacks a tokenizer, chat template or end token that the rows need.
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
        self._end_name = self._end()

    def _end(self) -> str:
        """Return the text of the end token, which responses of some data sets contain."""
        if self._render is None:
            token = self.wrapping.end_token
            return "" if token is None else self.codec.added_tokens.get(token, "")
        try:
            return chat_wrapping(self._render).end_text.strip()
        except ValueError:  # the template changes texts, so their ends are unknown
            return ""

    def items(self, rows: Iterable[Row]) -> Items:
        """Make the items of rows.

        Raises:
            ConfigError: a row is too long or has no token to learn.
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
        """Return the pieces of text in order, each with True for a response."""
        response = self._without_end(response)
        if self._render is None:
            assert isinstance(row.prompt, str), "messages need a chat template"
            rule = self.wrapping
            return [(rule.prompt(row.prompt), False), (f"{response}{rule.end_text}", True)]
        try:
            found = pieces(conversation(row, response), self._render, row.where)
        except ValueError as error:
            raise refusal("dataset", f"dataset: {error}") from error
        return found

    def _without_end(self, response: Text) -> Text:
        """Remove the end token from a response, because the rule or the template adds one."""
        if isinstance(response, str):
            return response.removesuffix(self._end_name) if self._end_name else response
        return tuple(
            (role, str(self._without_end(content)) if role == ASSISTANT else content)
            for role, content in response
        )

    def _encoded(self, sequences: list[list[tuple[str, bool]]]) -> list[tuple[list[int], Any]]:
        """Tokenize all texts in two calls; returns tokens and response spans of each sequence."""
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
            for at, (_, is_response) in enumerate(texts[1:], start=2):
                start = len(tokens)
                tokens += next(rest)
                if at == len(texts):
                    tokens += self.wrapping.end if begins else ()
                if is_response and len(tokens) > start:
                    spans.append(Span(start, len(tokens)))
            encoded.append((tokens, spans))
        return encoded

    def _example(self, row: Row, encoded: tuple[list[int], list[Span]]) -> Example:
        tokens, spans = encoded
        if spans and not spans[0].start and not row.prompt and spans[0].end > 1:
            spans = [Span(1, spans[0].end), *spans[1:]]  # no token predicts the first one of a text
        if not spans or not spans[0].start:
            what = "a prompt" if spans else "a response"
            raise refusal(
                "dataset",
                f"{row.where} has {what} without tokens, but learning needs a token before and "
                "in each response: add text, or set dataset.prompt_template or dataset.end_token",
            )
        if self._learn == "everything":
            spans = [Span(1, len(tokens))]
        return Example(array("i", tokens), () if self._learn == "score" else tuple(spans))


def _end_token(folder: Path, codec: TextCodec) -> int:
    """Return the end token of responses: the tokenizer's, else the only one of the model."""
    file = folder / "tokenizer_config.json"
    named = read_object(file).get("eos_token") if file.is_file() else ""
    name = named.get("content") if isinstance(named, dict) else named
    token = codec.token(name) if name and isinstance(name, str) else None
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


Render: TypeAlias = Callable[[Sequence[Message], bool], str]
"""`(messages, whether the assistant speaks next) -> text`."""
_PROMPT: Final = "@@prompt@@"
_RESPONSE: Final = "@@response@@"


def chat_renderer(folder: Path) -> Render:
    """Load the chat template of a model folder.

    Raises:
        ValueError: the model has no chat template, or it cannot be read; in one line.
    """
    try:
        return load_template(folder).data
    except ValueError as error:
        raise ValueError(
            f"{error}; rows with prompt and response, and dataset.prompt_template, need no template"
        ) from error


def conversation(row: Row, response: Text) -> tuple[Message, ...]:
    """Return the messages of a row with one of its responses."""
    prompt = (("user", row.prompt),) if isinstance(row.prompt, str) and row.prompt else row.prompt
    replies = ((ASSISTANT, response),) if isinstance(response, str) else response
    return (*(prompt or ()), *replies)


def pieces(messages: Sequence[Message], render: Render, where: str) -> list[tuple[str, bool]]:
    """Split the text of a conversation into pieces, each with True for the assistant's messages.

    Messages after the last one of the assistant are left out.

    Args:
        messages: the conversation.
        render: the chat template.
        where: file and line, for errors.

    Raises:
        ValueError: the template writes earlier messages differently when more follow, or refuses
            the conversation; in one line.
    """
    found: list[tuple[str, bool]] = []
    written = ""
    for index, (role, _) in enumerate(messages):
        if role != ASSISTANT or index == 0:
            continue
        for upto, is_response in ((index, False), (index + 1, True)):
            try:
                text = render(messages[:upto], not is_response)
            except TemplateRefusal as error:
                raise ValueError(f"{where}: {error}") from error
            if not text.startswith(written):
                raise ValueError(
                    f"{where}: the chat template writes message {index + 1} differently when "
                    "further messages follow, so no text is what the model saw; use one response "
                    "per row"
                )
            found.append((text[len(written) :], is_response))
            written = text
    return found


def chat_wrapping(render: Render) -> Wrapping:
    """Return the texts that a chat template writes around one user message and one response.

    Raises:
        ValueError: the template changes the messages; in one line.
    """
    messages = (("user", _PROMPT), (ASSISTANT, _RESPONSE))
    (prompt, _), (response, _) = pieces(messages, render, "a trial conversation")
    if prompt.count(_PROMPT) != 1 or not response.startswith(_RESPONSE):
        raise ValueError("the chat template changes the text of a message; use prompt_template")
    prefix, suffix = prompt.split(_PROMPT)
    end = response.removeprefix(_RESPONSE)
    return Wrapping(prefix=prefix, suffix=suffix, end_text=end, begins=False)


@dataclass(frozen=True, slots=True)
class Data:
    """Items of a run."""

    train: list[Item]
    held_out: list[Item]
    wrapping: Wrapping
    digest: str
    dropped: dict[str, int]
    """Number of rows that were left out, by reason."""


def make_data(config: OfflineConfig, model_path: Path, rows: RowSet) -> Data:
    """Make and check the items of a run.

    Args:
        config: settings of the run.
        model_path: folder with the tokenizer.
        rows: training and held-out rows.

    Raises:
        ConfigError: a row cannot be used, or there are too few rows.
    """
    dataset = config.rows
    learn: Learn = "responses"
    if isinstance(config, SFTConfig):
        learn = config.train_on
    elif isinstance(config, RewardModelConfig):
        learn = "score"
    encoder = Encoder(model_path, dataset, learn, chat=rows.has_messages)
    train, held_out = encoder.items(rows.train), encoder.items(rows.held_out)
    dropped = dict(train.dropped + held_out.dropped)
    if rows.in_both:
        dropped["the prompt is also held out"] = rows.in_both
    for items, what in ((train, "train on"), (held_out, "hold out")):
        needed = dataset.batch_size if what == "train on" else 1
        if len(items.items) < needed:
            why = f" (left out: {dict(items.dropped)})" if items.dropped else ""
            raise refusal(
                "dataset",
                f"dataset has {len(items.items)} rows to {what}{why}, but needs at least {needed}",
            )
    return Data(train.items, held_out.items, encoder.wrapping, rows.digest(), dropped)
