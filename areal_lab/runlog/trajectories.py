"""Read trajectories/: the samples that each step was trained on, their tokens as columns.

    step-00001.jsonl   prompts, completions, tokens, behavior log-probs  --.
    step-00001.npz     training fields (token_fields), if recorded       --+--> Samples, Tokens
    step-00002.jsonl   ...                                               --'

Axes: `N` samples in the order of training, `T` response tokens, sample after sample; tokens that
the environment wrote (observations) are among them, with version and lag -1.

A line of a file is one group, its prompt once; in older files it is one sample with its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.events import PROMPT_VERSION
from areal_lab.runlog.appended import read_appended

FOLDER: Final = "trajectories"
UNKNOWN: Final = -1
"""Text offsets of tokens whose file has none, and the lag of observations."""

Column = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trained sample, without its tokens."""

    step: int
    """The training step, from 1; the trainer's version before it is `step - 1`."""
    group: int
    sample: int
    """Index inside its group."""
    prompt: str
    completion: str
    prompt_tokens: tuple[int, ...]
    reward: float
    rewards: Mapping[str, float]
    finish_reason: str
    tokens: int
    """Of the response."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The response tokens of all samples, one array per column.

    Columns, each of length `T`:

    - `sample`: row of the token's sample. `position`: of the token in its response, from 0.
    - `ids`: in the model's vocabulary.
    - `behavior_logprobs`: log pi_behav as the engine reported it, in nats; nan on observations.
    - `versions`: of the policy that generated the token. `lag`: the trainer's version minus that.
      Both are -1 on observations.
    - `text_start`, `text_end`: characters of the completion that the token adds; -1 if the file has
      no offsets. A token that ends inside a character adds none: its last one adds it.
    """

    columns: Mapping[str, Column]
    starts: Column
    """`[N + 1]`: tokens of sample `i` are those from `starts[i]` up to `starts[i + 1]`."""
    completions: tuple[str, ...]
    special: Mapping[int, str]
    """Names of special tokens, which add no text, by id."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, name: str) -> Column:
        """A column.

        Raises:
            KeyError: naming the columns that there are.
        """
        try:
            return self.columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; there are {', '.join(self.columns)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    @property
    def bytes(self) -> int:
        """Memory of the columns."""
        return sum(column.nbytes for column in self.columns.values())

    def of(self, sample: int) -> slice:
        """The tokens of a sample, by its row."""
        return slice(int(self.starts[sample]), int(self.starts[sample + 1]))

    def rows(self, name: str, samples: Sequence[int] | None = None) -> list[Column]:
        """A column cut into samples: views, one array each.

        Args:
            name: of the column.
            samples: rows to return, in this order; all if None.
        """
        column = self[name]
        chosen = range(len(self.starts) - 1) if samples is None else samples
        return [column[self.of(sample)] for sample in chosen]

    def mean(self, name: str) -> NDArray[np.float64]:
        """Mean of a column over the tokens of each sample that have a value, `[N]`.

        Values that are nan are left out, and so are observations in `lag` and `versions`; a sample
        without a value has nan.
        """
        values = self[name].astype(np.float64)
        known = np.isfinite(values)
        if name in ("lag", "versions"):
            known &= values >= 0
        sums = self._sums(np.where(known, values, 0.0))
        counts = self._sums(known.astype(np.float64))
        means: NDArray[np.float64] = np.full(len(sums), np.nan)
        return np.divide(sums, counts, out=means, where=counts > 0)

    def texts(self, sample: int) -> list[str]:
        """The text that each token of a sample adds; joined, they are the completion.

        Raises:
            ValueError: if the file of the sample has no offsets.
        """
        tokens = self.of(sample)
        starts, ends = self["text_start"][tokens], self["text_end"][tokens]
        if len(starts) and starts[0] == UNKNOWN:
            raise ValueError(
                f"sample {sample} was recorded without the text of each token; "
                "runs of this version of areal_lab have it"
            )
        completion = self.completions[sample]
        return [completion[s:e] for s, e in zip(starts.tolist(), ends.tolist(), strict=True)]

    def labels(self, sample: int) -> list[str]:
        """A readable text for each token of a sample, also where it adds none to the completion.

        `' 17'` is text, `<|im_end|>` a special token, `part of '€'` a token that ends inside a
        character, and `token 42` an id, where the file has no offsets.
        """
        ids = self["ids"][self.of(sample)].tolist()
        if not self.has_text(sample):
            return [f"token {token}" for token in ids]
        labels, following = [], ""
        for token, text in zip(reversed(ids), reversed(self.texts(sample)), strict=True):
            if text:
                labels.append(repr(text))
                following = text[0]
            elif token in self.special:
                labels.append(self.special[token])
            else:
                labels.append(f"part of {following!r}" if following else "part of a character")
        return labels[::-1]

    def has_text(self, sample: int) -> bool:
        """Whether the file of the sample has the text of each token."""
        return bool((self["text_start"][self.of(sample)] != UNKNOWN).all())

    def _sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        if len(self.starts) == 1:
            return np.zeros(0)
        # Pyodide's intp has 32 bits and refuses int64 indices.
        sums: NDArray[np.float64] = np.add.reduceat(
            values, self.starts[:-1].astype(np.intp, copy=False)
        )
        return sums


@dataclass(frozen=True, slots=True, eq=False)
class StepFile:
    """One file of trajectories/, read."""

    size: int
    """Bytes; a file of another size is read again."""
    samples: tuple[Sample, ...]
    columns: Mapping[str, Column]
    """Of `Tokens`, without `sample`, `position` and `lag`."""
    special: Mapping[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The samples of a run so far."""

    rows: tuple[Sample, ...] = ()
    tokens: Tokens = field(default_factory=lambda: _tokens((), ()))
    files: Mapping[str, StepFile] = field(default_factory=dict)
    """By name, for the next reading."""


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
    paths = sorted((run / FOLDER).glob("step-*.jsonl"))
    files = {path.name: _unchanged(path, before) or _read_file(path) for path in paths}
    if list(files.items()) == list(before.files.items()):
        return before
    rows = tuple(sample for file in files.values() for sample in file.samples)
    return Samples(rows, _tokens(rows, tuple(files.values())), files)


def _unchanged(path: Path, before: Samples) -> StepFile | None:
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


def _read_file(path: Path) -> StepFile:
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
        prompt=group["prompt"],
        completion=sample["completion"],
        prompt_tokens=tuple(group["prompt_tokens"]),
        reward=sample["reward"],
        rewards=sample["rewards"],
        finish_reason=sample["finish_reason"],
        tokens=tokens,
    )
