"""The response tokens of a run as columns: one numpy array per column.

starts        0             4       6                       N samples, T tokens
sample        0  0  0  0    1  1    2 ...
position      0  1  2  3    0  1    0 ...
versions      3  3  4  4    4  4    3 ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

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

        Text is as it is, with `↵` for a new line. A special token is its name, `<|im_end|>`; a
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
