"""Read trajectories/: the samples that each step was trained on, their tokens as columns.

    step-00001.jsonl   prompts, completions, tokens, behavior log-probs  --.
    step-00001.npz     training fields (`fields`), if recorded           --+--> Samples, Tokens
    step-00002.jsonl   ...                                               --'

Axes: `N` samples in the order of training, `T` response tokens, sample after sample, including
tokens of the environment (observations), with version and lag -1.

A line of a file is one group with its prompt; in older files it is one sample with its prompt.

A line of a file is one group, its prompt once; in older files it is one sample with its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Final, Required, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from areal_lab.control.events import PROMPT_VERSION
from areal_lab.host.foreign import Parsed, parse_json
from areal_lab.models.checkpoint_files import SAMPLES, step_files
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.token_columns import UNKNOWN, Column, Tokens, read_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trained sample, without its tokens."""

    step: int
    """The training step, from 1; the trainer's version before it is `step - 1`."""
    group: int
    sample: int
    """Index inside its group."""
    row: int = 0
    """Index inside its sample, whose conversation may have branches."""
    turns: tuple[Mapping[str, Any], ...] = ()
    """Tokens, and tool, outcome and reward if any, of each turn; empty with one turn."""
    prompt: str
    completion: str
    prompt_tokens: tuple[int, ...]
    images: tuple[Mapping[str, Any], ...] = ()
    """Images of the prompt: `sha256`, which names its file in the folder `images`, `start` (its
    first placeholder among the prompt's tokens), `rows` and `columns` of placeholders."""
    reward: float
    rewards: Mapping[str, float]
    finish_reason: str
    tokens: int
    """Number of response tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class StepFile:
    """Content of one file of trajectories/."""

    size: int
    """Size in bytes; a file of another size is read again."""
    samples: tuple[Sample, ...]
    columns: Mapping[str, Column]
    """Columns of `Tokens`, without `sample`, `position`, `lag` and the training fields."""
    special: Mapping[int, str]
    fields: Mapping[str, Column] | None = None
    """Training fields; None if their file does not exist (yet)."""
    advantages: Column | None = None
    """Advantage of each sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The samples of a run so far."""

    rows: tuple[Sample, ...] = ()
    tokens: Tokens = field(default_factory=lambda: _tokens((), ()))
    files: Mapping[str, StepFile] = field(default_factory=dict)
    """Files by name, for the next reading."""

    @property
    def advantages(self) -> NDArray[np.float32]:
        """Advantage of each sample, `[N]`; nan if its step has no training fields."""
        return np.concatenate(
            [
                np.full(len(file.samples), np.nan, np.float32)
                if file.advantages is None
                else file.advantages
                for file in self.files.values()
            ]
            or [np.zeros(0, np.float32)]
        )


def read_samples(run: Path, before: Samples | None = None) -> Samples:
    """Samples of a run folder; empty without trajectories.

    The earlier reading `before` is returned if nothing was added to it; its files are not read
    again.
    """
    before = before or Samples()
    paths = list(step_files(run, *SAMPLES).values())
    files = {path.name: _with_fields(path, _known(path, before) or _read(path)) for path in paths}
    if list(files.items()) == list(before.files.items()):
        return before
    rows = tuple(sample for file in files.values() for sample in file.samples)
    return Samples(rows, _tokens(rows, tuple(files.values())), files)


def _known(path: Path, before: Samples) -> StepFile | None:
    known = before.files.get(path.name)
    return known if known is not None and known.size == path.stat().st_size else None


def _tokens(rows: Sequence[Sample], files: Sequence[StepFile]) -> Tokens:
    lengths = np.array([row.tokens for row in rows], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    columns: dict[str, Column] = {
        "sample": np.repeat(np.arange(len(rows), dtype=np.int32), lengths.astype(np.intp)),
        "position": _positions(lengths, starts),
    }
    for name, dtype in _FILE_COLUMNS.items():
        parts = [file.columns[name] for file in files]
        columns[name] = np.concatenate(parts) if parts else np.zeros(0, dtype)
    fields = dict.fromkeys(name for file in files for name in file.fields or ())
    for name in fields:
        columns[name] = np.concatenate([_field(file, name) for file in files])
    trainer = np.array([row.step - 1 for row in rows], dtype=np.int32)
    versions = columns["versions"]
    lag = np.repeat(trainer, lengths.astype(np.intp)) - versions
    columns["lag"] = np.where(versions == PROMPT_VERSION, np.int32(UNKNOWN), lag)
    special = {token: name for file in files for token, name in file.special.items()}
    return Tokens(columns, starts, tuple(row.completion for row in rows), special)


def _positions(lengths: Column, starts: Column) -> Column:
    everything = np.arange(starts[-1], dtype=np.int32)
    first = np.repeat(starts[:-1].astype(np.int32), lengths.astype(np.intp))
    return everything - first


def _field(file: StepFile, name: str) -> Column:
    if file.fields is not None and name in file.fields:
        return file.fields[name]
    return np.full(len(file.columns["ids"]), np.nan, np.float32)


# --- one file ------------------------------------------------------------------------------------

_FILE_COLUMNS: Final[dict[str, type[np.generic]]] = {
    "ids": np.int32,
    "behavior_logprobs": np.float32,
    "versions": np.int32,
    "text_start": np.int32,
    "text_end": np.int32,
}


@dataclass(slots=True)
class _Columns:
    """Columns of a file while it is read."""

    ids: list[int] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text_start: list[int] = field(default_factory=list)
    text_end: list[int] = field(default_factory=list)


def _read(path: Path) -> StepFile:
    read = read_appended(path)
    columns, samples = _Columns(), []
    special: dict[int, str] = {}
    for number, line in enumerate(read.lines, start=1):
        try:
            value = parse_json(line)
            group = _GROUP(value)
            members = group.get("samples", [value])
            samples += [_sample(group, _SAMPLE(one), columns) for one in members]
            special |= {int(token): name for token, name in group.get("special", {}).items()}
        except ValueError as error:
            raise ValueError(f"line {number} of {path} cannot be read: {error}") from error
    with np.errstate(over="ignore"):  # of log-probs that no engine has, which become infinite
        arrays = {
            name: np.array(getattr(columns, name), dtype) for name, dtype in _FILE_COLUMNS.items()
        }
    return StepFile(path.stat().st_size, tuple(samples), arrays, special)


_Count: TypeAlias = Annotated[int, Field(strict=True, ge=-1, lt=2**31)]
"""A number in a line that becomes an element of an int32 column."""
_Ids: TypeAlias = list[_Count]


class _Image(TypedDict):
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    start: _Count
    rows: _Count
    columns: _Count


@final
class _Generated(TypedDict):
    version: _Count
    tokens: _Ids
    logprobs: list[float]


@final
class _Observed(TypedDict):
    observation: _Ids


class _Group(TypedDict, total=False):
    """A line; in older files it has one sample, without `samples`."""

    step: Required[_Count]
    group: Required[_Count]
    prompt: Required[str]
    prompt_tokens: Required[_Ids]
    images: list[_Image]
    samples: list[dict[str, Any]]
    special: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], str]


class _Turn(TypedDict, total=False):
    tokens: Required[_Count]
    tool: str
    outcome: str
    fork: str
    reward: float | None


class _OneSample(TypedDict, total=False):
    sample: Required[_Count]
    prompt: str
    prompt_tokens: _Ids
    images: list[_Image]
    row: _Count
    completion: Required[str]
    parts: Required[list[_Observed | _Generated]]
    characters: list[_Count] | None
    turns: list[_Turn]
    reward: Required[float | None]
    rewards: Required[dict[str, float]]
    finish_reason: Required[str]


_GROUP: Final = Parsed[_Group](_Group)
_SAMPLE: Final = Parsed[_OneSample](_OneSample)


def _sample(group: _Group, sample: _OneSample, columns: _Columns) -> Sample:
    """Append the sample's tokens to the columns."""
    before = len(columns.ids)
    for part in sample["parts"]:
        if "observation" in part:
            tokens, logprobs, version = part["observation"], None, PROMPT_VERSION
        else:
            tokens, logprobs, version = part["tokens"], part["logprobs"], part["version"]
        columns.ids += tokens
        columns.behavior_logprobs += [np.nan] * len(tokens) if logprobs is None else logprobs
        columns.versions += [version] * len(tokens)
    count = len(columns.ids) - before
    if len(columns.behavior_logprobs) != len(columns.ids):
        raise ValueError(f"sample {sample['sample']} has not one log-prob per token")
    added = sample.get("characters")
    if added is None:
        columns.text_start += [UNKNOWN] * count
        columns.text_end += [UNKNOWN] * count
    elif len(added) != count or sum(added) != len(sample["completion"]):
        raise ValueError(
            f"sample {sample['sample']} has {count} tokens and {len(sample['completion'])} "
            f"characters, but counts {sum(added)} characters of {len(added)} tokens"
        )
    else:
        ends = list(accumulate(added, initial=0))
        columns.text_start += ends[:-1]
        columns.text_end += ends[1:]
    return Sample(
        step=group["step"],
        group=group["group"],
        sample=sample["sample"],
        row=sample.get("row", 0),
        turns=tuple(sample.get("turns", ())),
        prompt=sample.get("prompt", group["prompt"]),
        completion=sample["completion"],
        prompt_tokens=tuple(sample.get("prompt_tokens", group["prompt_tokens"])),
        images=tuple((sample if "prompt_tokens" in sample else group).get("images", ())),
        reward=np.nan if sample["reward"] is None else sample["reward"],
        rewards=sample["rewards"],
        finish_reason=sample["finish_reason"],
        tokens=count,
    )


def _with_fields(path: Path, file: StepFile) -> StepFile:
    """Add the training fields to a file, which are written after it."""
    fields = path.with_name(path.name.split(".")[0] + ".npz")
    if file.fields is not None or not fields.is_file():
        return file
    read = read_fields(fields)
    generated = file.columns["versions"] != PROMPT_VERSION
    sample = np.repeat(
        np.arange(len(file.samples)),
        np.array([one.tokens for one in file.samples], dtype=np.intp),
    )
    chosen = np.bincount(sample[generated], minlength=len(file.samples))
    if len(read.advantages) != len(chosen) or (chosen[read.samples] != read.tokens).any():
        raise ValueError(
            f"{fields} has {int(read.tokens.sum())} tokens of {len(read.advantages)} samples that "
            f"are not those of {path.name}"
        )
    trained = generated & np.isin(sample, read.samples)

    def spread(values: Column) -> Column:
        column = np.full(len(sample), np.nan, np.float32)
        column[trained] = values
        return column

    proximal = file.columns["behavior_logprobs"] + spread(read.proximal_minus_behavior)
    columns = {
        "advantages": np.where(generated, read.advantages[sample], np.float32(np.nan)),
        "proximal_logprobs": proximal,
        "logprobs": proximal + spread(read.logprob_minus_proximal),
        "entropy": spread(read.entropy),
    }
    taken = {*columns, *_FILE_COLUMNS, "sample", "position", "lag"}
    for name, values in read.loss.items():
        columns[f"loss_{name}" if name in taken else name] = spread(values)
    return replace(file, fields=columns, advantages=read.advantages)
