"""Read trajectories/: the samples that each step was trained on, their tokens as columns.

    step-00001.jsonl   prompts, completions, tokens, behavior log-probs  --.
    step-00001.npz     training fields (`fields`), if recorded           --+--> Samples, Tokens
    step-00002.jsonl   ...                                               --'

Axes: `N` samples in the order of training, `T` response tokens, sample after sample; tokens that
the environment wrote (observations) are among them, with version and lag -1.

A line of a file is one group, its prompt once; in older files it is one sample with its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.events import PROMPT_VERSION
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.tokens.columns import UNKNOWN, Column, Tokens
from areal_lab.runlog.tokens.fields import read_fields

FOLDER: Final = "trajectories"


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
    """Tokens, and tool, outcome and reward if there are any, of each turn; empty with one turn."""
    prompt: str
    completion: str
    prompt_tokens: tuple[int, ...]
    images: tuple[Mapping[str, Any], ...] = ()
    """Of the prompt: `sha256`, which names its file in the folder `images`, `start` (its first
    placeholder among the prompt's tokens), `rows` and `columns` of placeholders."""
    reward: float
    rewards: Mapping[str, float]
    finish_reason: str
    tokens: int
    """Of the response."""


@dataclass(frozen=True, slots=True, eq=False)
class StepFile:
    """One file of trajectories/, read."""

    size: int
    """Bytes; a file of another size is read again."""
    samples: tuple[Sample, ...]
    columns: Mapping[str, Column]
    """Of `Tokens`, without `sample`, `position`, `lag` and the training fields."""
    special: Mapping[int, str]
    fields: Mapping[str, Column] | None = None
    """Training fields; None if there is no file of them (yet)."""
    advantages: Column | None = None
    """Of each sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The samples of a run so far."""

    rows: tuple[Sample, ...] = ()
    tokens: Tokens = field(default_factory=lambda: _tokens((), ()))
    files: Mapping[str, StepFile] = field(default_factory=dict)
    """By name, for the next reading."""

    @property
    def advantages(self) -> NDArray[np.float32]:
        """Of each sample, `[N]`; nan if its step has no training fields."""
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
    """The samples of a run folder; none if it has no trajectories.

    Args:
        run: the run folder.
        before: an earlier reading, which is returned if nothing was added to it; its files are not
            read again.

    Raises:
        ValueError: naming the file and line that cannot be read.
    """
    before = before or Samples()
    paths = sorted(p for kind in ("", ".gz") for p in (run / FOLDER).glob(f"step-*.jsonl{kind}"))
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
            value = json.loads(line)
            samples += [_sample(value, one, columns) for one in value.get("samples", [value])]
            special |= {int(token): name for token, name in value.get("special", {}).items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else f"cannot be read: {error}"
            raise ValueError(f"line {number} of {path} {what}") from error
    arrays = {
        name: np.array(getattr(columns, name), dtype) for name, dtype in _FILE_COLUMNS.items()
    }
    return StepFile(path.stat().st_size, tuple(samples), arrays, special)


def _sample(group: Mapping[str, Any], sample: Mapping[str, Any], columns: _Columns) -> Sample:
    """Append the sample's tokens to the columns."""
    before = len(columns.ids)
    for part in sample["parts"]:
        observed = part.get("observation")
        tokens = part["tokens"] if observed is None else observed
        columns.ids += tokens
        columns.behavior_logprobs += (
            part["logprobs"] if observed is None else [np.nan] * len(tokens)
        )
        columns.versions += [part["version"] if observed is None else PROMPT_VERSION] * len(tokens)
    tokens = len(columns.ids) - before
    if len(columns.behavior_logprobs) != len(columns.ids):
        raise ValueError(f"sample {sample['sample']} has not one log-prob per token")
    added = sample.get("characters")
    if added is None:
        columns.text_start += [UNKNOWN] * tokens
        columns.text_end += [UNKNOWN] * tokens
    elif len(added) != tokens or sum(added) != len(sample["completion"]):
        raise ValueError(
            f"sample {sample['sample']} has {tokens} tokens and {len(sample['completion'])} "
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
        reward=sample["reward"],
        rewards=sample["rewards"],
        finish_reason=sample["finish_reason"],
        tokens=tokens,
    )


def _with_fields(path: Path, file: StepFile) -> StepFile:
    """The file with its training fields, which are written after it."""
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
