"""Response tokens of a run as columns: one numpy array per column, training fields included.

How many tokens PPO's clip drops, by their age: around the start of the step, around the sampler.

    u = pi_theta / pi_prox     decoupled PPO clips this one (AReaL, arXiv:2505.24298, eq. 5)
    u = pi_theta / pi_behav    standard PPO clips this one: the whole way from the sampler

The clip removes the gradient of a token that has moved far enough the way its advantage pushes it:
u > 1 + eps with A > 0, or u < 1 - eps with A < 0. Counts are over tokens with training fields.

The response tokens of a run as columns: one numpy array per column.

starts        0             4       6                       N samples, T tokens
sample        0  0  0  0    1  1    2 ...
position      0  1  2  3    0  1    0 ...
versions      3  3  4  4    4  4    3 ...

Training fields of tokens: one .npz a step, beside its trajectories; a column per field.

member                      type      one value per
samples, tokens             int32     sample in the forward pass: its place in the step, its tokens
advantages                  float32   sample of the step
proximal_minus_behavior     float16   token: log pi_prox - log pi_behav
logprob_minus_proximal      float16   token: log pi_theta - log pi_prox
entropy                     float16   token: nats
loss.NAME                   float16   token: a field of the loss's result, such as behavior_weight;
                                      bool if the loss returns flags, such as clipped

Tokens are those that the policy chose, in the order of the step's samples. For PPO, samples of
advantage 0 are not in the forward pass and have no values but their advantage.

float16 has a relative error of at most 2^-11. So differences of log-probs are stored: they are near
0, where it is fine, and log-probs near -10, where it is coarse (0.004), are not. The behavior
log-probs are in the step's .jsonl. A column that float16 cannot hold (65504) is float32. Members
are deflated: flags that are never set, and ratios that are all 1, take next to nothing. With
decoupled PPO that makes 8 to 10 bytes a token, and 2 kB a file (`benchmarks.token_files`).

npz and not safetensors, since numpy alone reads it, column by column, and deflates.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.extras import require
from areal_lab.host.durable import replacing
from areal_lab.host.foreign import UNPACKED_BYTES, read_bytes, unreadable

if TYPE_CHECKING:
    import pandas as pd


UNKNOWN: Final = -1
"""Text offsets of tokens whose file has none, and the lag of observations."""

Column = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The response tokens of all samples, one array per column.

    Columns, each of length `T`:

    - `sample`: row of the token's sample. `position`: of the token in its response, from 0.
    - `ids`: in the model's vocabulary.
    - `behavior_logprobs`: log pi_behav as the engine reported it, in nats; nan on observations.
    - `versions`: of the policy that generated the token. `lag`: the trainer's version minus that.
      Both are -1 on observations.
    - With `token_fields=true` also `advantages`, `proximal_logprobs`, `logprobs` (pi_theta),
      `entropy`, and the fields of the loss (`ratio`, `behavior_weight`, `clipped`): float32, nan
      for tokens that were not in the trainer's forward pass. Flags are 0 and 1.
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
        """A column."""
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
        if sample >= len(self.starts) - 1:
            raise ValueError(
                f"sample {sample} has no tokens: the run has trajectories of "
                f"{len(self.starts) - 1} samples; files of the others are missing, or were not "
                "written"
            )
        return slice(int(self.starts[sample]), int(self.starts[sample + 1]))

    def rows(self, name: str, samples: Sequence[int] | None = None) -> list[Column]:
        """A column cut into samples: views, one array each; only `samples`, in this order,
        unless None.
        """
        column = self[name]
        chosen = range(len(self.starts) - 1) if samples is None else samples
        return [column[self.of(sample)] for sample in chosen]

    def mean(self, name: str) -> NDArray[np.float64]:
        """Mean of a column over the tokens of each sample that have a value, `[N]`.

        Ignores nan, and observations in `lag` and `versions`; a sample without a value has nan.
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
        """Text that each token of a sample adds; joined, they are the completion."""
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
        """Readable text for each token of a sample, even if it adds none to the completion.

        Text is unchanged, with `↵` for a new line. A special token is its name, `<|im_end|>`; a
        token that ends inside a character is `part of '€'`; where the file has no offsets, a token
        is its id, `token 42`.
        """
        ids = self["ids"][self.of(sample)].tolist()
        if not self.has_text(sample):
            return [f"token {token}" for token in ids]
        labels, following = [], ""
        for token, text in zip(reversed(ids), reversed(self.texts(sample)), strict=True):
            if text:
                labels.append(text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"))
                following = text[0]
            elif token in self.special:
                labels.append(self.special[token])
            else:
                labels.append(f"part of {following!r}" if following else "part of a character")
        return labels[::-1]

    def has_text(self, sample: int) -> bool:
        """Return whether the file of the sample has the text of each token."""
        return bool((self["text_start"][self.of(sample)] != UNKNOWN).all())

    def _sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        if len(self.starts) == 1:
            return np.zeros(0)
        # Pyodide's intp has 32 bits and refuses int64 indices.
        sums: NDArray[np.float64] = np.add.reduceat(
            values, self.starts[:-1].astype(np.intp, copy=False)
        )
        return sums


_LOSS: Final = "loss."
_LEVEL: Final = 1
"""Compression level: higher ones save little, because mantissas of floats are noise."""
_MEMBERS: Final = 100
_LARGEST: Final = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True, eq=False)
class TokenFields:
    """Fields of one step; `R` tokens in the forward pass, of `M` of the step's `N` samples."""

    samples: Column
    """`[M]`: indices in the step, ascending."""
    tokens: Column
    """`[M]`: sampled tokens of each; their sum is `R`."""
    advantages: Column
    """`[N]`."""
    proximal_minus_behavior: Column
    logprob_minus_proximal: Column
    """pi_theta is the policy in the training forward of the token's minibatch, before its
    update; in the first minibatch it equals pi_prox."""
    entropy: Column
    loss: Mapping[str, Column]
    """Per-token fields of the loss's result, by name."""


def fields_path(trajectories: Path, step: int) -> Path:
    """File of a step."""
    return trajectories / f"step-{step:05d}.npz"


def write_fields(path: Path, fields: TokenFields) -> None:
    """Write the file of one step; it appears complete or not at all."""
    members: dict[str, Column] = {
        "samples": fields.samples.astype(np.int32),
        "tokens": fields.tokens.astype(np.int32),
        "advantages": fields.advantages.astype(np.float32),
        "proximal_minus_behavior": _compact(fields.proximal_minus_behavior),
        "logprob_minus_proximal": _compact(fields.logprob_minus_proximal),
        "entropy": _compact(fields.entropy),
        **{_LOSS + name: _compact(column) for name, column in fields.loss.items()},
    }
    with (
        replacing(path) as target,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive,
    ):
        for name, values in members.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, values, allow_pickle=False)


def read_fields(path: Path) -> TokenFields:
    """Read the file of one step; floats as float32."""
    try:
        content = io.BytesIO(read_bytes(path, limit_bytes=UNPACKED_BYTES))
        with zipfile.ZipFile(content) as archive:
            members = {
                one.filename.removesuffix(".npy"): _wide(_member(archive, one))
                for one in _checked(archive)
            }
        known = {name: members.pop(name) for name in list(members) if not name.startswith(_LOSS)}
        loss = {name.removeprefix(_LOSS): column for name, column in members.items()}
        return TokenFields(**known, loss=loss)
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile and numpy raise many types for damaged files
        raise unreadable(path, error) from error


def _checked(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Members of the archive; a small archive that unpacks to a large one is refused."""
    members = archive.infolist()
    unpacked = sum(one.file_size for one in members)
    if len(members) > _MEMBERS or unpacked > UNPACKED_BYTES:
        raise ValueError(
            f"it has {len(members)} arrays of {unpacked:,} bytes, but at most {_MEMBERS} of "
            f"{UNPACKED_BYTES:,} bytes are read"
        )
    return members


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Column:
    """One array of numbers, of one dimension; its size is that of the member, not the declared
    one.
    """
    with archive.open(member) as file:
        values = np.load(io.BytesIO(file.read(UNPACKED_BYTES)), allow_pickle=False)
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "bif":
        raise ValueError(f"{member.filename} is not a list of numbers")
    return values


def _compact(values: Column) -> Column:
    if values.dtype == np.bool_:
        return values
    finite = values[np.isfinite(values)]
    fits = not len(finite) or float(np.abs(finite).max()) <= _LARGEST
    return values.astype(np.float16 if fits else np.float32)


def _wide(values: Column) -> Column:
    return values.astype(np.float32) if values.dtype == np.float16 else values


def clipped_by_lag(tokens: Tokens, *, clip_epsilon: float = 0.2) -> pd.DataFrame:
    """Shares of tokens that the clip drops, by lag (the index, in versions).

    Columns: `tokens`; `decoupled_ppo` and `standard_ppo`, the shares from 0 to 1 that each of them
    drops of these tokens; `weight_change`, the mean of |log(pi_prox / pi_behav)|, in nats.
    """
    require("clipped_by_lag", "notebooks", "pandas")
    import pandas as pd

    if not clip_epsilon > 0:
        raise ValueError(f"clip_epsilon is {clip_epsilon}, but must be > 0")
    if "logprobs" not in tokens:
        raise ValueError("the run has no training fields; record them with token_fields=true")
    trained = np.isfinite(tokens["logprobs"])
    logprobs, proximal, behavior, advantages, lag = (
        tokens[name][trained]
        for name in ("logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", "lag")
    )
    frame = pd.DataFrame(
        {
            "lag": lag,
            "tokens": 1,
            "decoupled_ppo": _dropped(np.exp(logprobs - proximal), advantages, clip_epsilon),
            "standard_ppo": _dropped(np.exp(logprobs - behavior), advantages, clip_epsilon),
            "weight_change": np.abs(proximal - behavior),
        }
    )
    how = dict.fromkeys(frame.columns.drop("lag"), "mean") | {"tokens": "sum"}
    return frame.groupby("lag").agg(how)


def _dropped(ratio: Column, advantages: Column, clip_epsilon: float) -> Column:
    above = (ratio > 1 + clip_epsilon) & (advantages > 0)
    below = (ratio < 1 - clip_epsilon) & (advantages < 0)
    dropped: Column = above | below
    return dropped
