"""Colors of tokens by a quantity: bins with a color and a label each, as `Strip` takes them.

    quantity             scale
    lag, version         sequential: dark blue is new, yellow is old
    probability, entropy cividis: yellow is uncertain
    weight, ratio        PuOr around 1; advantage around 0: what is neutral is grey
    clipped              two colors

Code 0 is a token without a value: an observation, or one that was not in the trainer's forward
pass. Palettes: matplotlib's viridis, cividis and PuOr.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.runlog.tokens.columns import Tokens

NO_VALUE: Final = "#8080801f"
_NEUTRAL: Final = "#90909080"
_MOST_LEVELS: Final = 10
_CIVIDIS: Final = ("#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838")
_DIVERGING: Final = ("#7f3b08", "#c1670f", "#f5b467", _NEUTRAL, "#b7aed3", "#7964a4", "#2d004b")
_VIRIDIS: Final = (
    *("#440154", "#482878", "#3e4989", "#31688e", "#26828e"),
    *("#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"),
)

Values = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class TokenColors:
    """A color for every token of a run."""

    quantity: str
    values: Values
    """`[T]`; nan where there is none."""
    codes: NDArray[np.uint8]
    """`[T]`: index into `colors`."""
    colors: tuple[str, ...]
    labels: tuple[str, ...]
    """What each color means, with its unit."""
    meaning: str
    """The quantity in a sentence."""

    def rows(self, tokens: Tokens, samples: Sequence[int]) -> list[NDArray[np.uint8]]:
        """The codes of some samples, one array each."""
        return [self.codes[tokens.of(sample)] for sample in samples]


@dataclass(frozen=True, slots=True)
class _Quantity:
    values: Callable[[Tokens], Values]
    edges: tuple[float, ...]
    """A value at an edge belongs to the bin above it."""
    labels: tuple[str, ...]
    """One more than edges."""
    palette: tuple[str, ...]
    meaning: str
    needs: tuple[str, ...]


def quantities(tokens: Tokens) -> list[str]:
    """What the tokens of a run can be colored by, in a sensible order."""
    known = [name for name, one in _BINNED.items() if all(need in tokens for need in one.needs)]
    return ["lag", "version", *known]


def token_colors(tokens: Tokens, quantity: str) -> TokenColors:
    """Bin a quantity of the tokens and give each bin a color.

    Args:
        tokens: of a run.
        quantity: one of `quantities(tokens)`.

    Raises:
        ValueError: if the run does not have the quantity, with those that it has.
    """
    if quantity not in quantities(tokens):
        hint = "" if "entropy" in tokens else "; token_fields=true records more in a run"
        raise ValueError(
            f"quantity is {quantity!r}, but this run has {', '.join(quantities(tokens))}{hint}"
        )
    if quantity in _LEVELS:
        return _leveled(tokens, quantity)
    spec = _BINNED[quantity]
    values = spec.values(tokens)
    # A value at an edge belongs to the bin above it.
    codes = 1 + np.searchsorted(np.array(spec.edges, values.dtype), values, side="right")
    codes[np.isnan(values)] = 0
    return TokenColors(
        quantity,
        values,
        codes.astype(np.uint8),
        (NO_VALUE, *spec.palette),
        (_absent(values), *spec.labels),
        spec.meaning,
    )


# --- lag and version: whole numbers, as many colors as there are values --------------------------

_LEVELS: Final = {
    "lag": ("lag", "versions that the trainer was ahead of the one that generated the token"),
    "version": ("versions", "version of the policy that generated the token"),
}
"""Column and meaning."""


def _leveled(tokens: Tokens, quantity: str) -> TokenColors:
    column, meaning = _LEVELS[quantity]
    values = tokens[column].astype(np.float32)
    values[tokens["versions"] < 0] = np.nan
    known = values[~np.isnan(values)]
    highest = int(known.max()) if len(known) else 0
    width = 1 + highest // _MOST_LEVELS
    bins = 1 + highest // width
    codes = np.where(np.isnan(values), 0, 1 + np.nan_to_num(values) // width).astype(np.uint8)
    palette = [_VIRIDIS[round(i * (len(_VIRIDIS) - 1) / max(1, bins - 1))] for i in range(bins)]
    if quantity == "version":
        palette.reverse()  # yellow is old in both
    labels = [
        f"{quantity} {first}" if width == 1 else f"{quantity} {first} to {first + width - 1}"
        for first in range(0, bins * width, width)
    ]
    return TokenColors(
        quantity, values, codes, (NO_VALUE, *palette), (_absent(values), *labels), meaning
    )


def _absent(values: Values) -> str:
    """The label of tokens without a value; empty, and so not listed, if there are none."""
    return "not in the forward pass" if np.isnan(values).any() else ""


# --- quantities with fixed bins ------------------------------------------------------------------

_BINNED: Final = {
    "weight": _Quantity(
        values=lambda tokens: np.exp(tokens["proximal_logprobs"] - tokens["behavior_logprobs"]),
        edges=(0.5, 0.8, 0.95, 1.05, 1.25, 2.0),
        labels=(
            *("weight < 0.5", "0.5 to 0.8", "0.8 to 0.95", "0.95 to 1.05"),
            *("1.05 to 1.25", "1.25 to 2", "2 and more"),
        ),
        palette=_DIVERGING,
        meaning="importance weight pi_prox / pi_behav, before it is truncated",
        needs=("proximal_logprobs",),
    ),
    "ratio": _Quantity(
        values=lambda tokens: np.exp(tokens["logprobs"] - tokens["proximal_logprobs"]),
        edges=(0.5, 0.8, 0.95, 1.05, 1.2, 2.0),
        labels=(
            *("ratio < 0.5", "0.5 to 0.8", "0.8 to 0.95", "0.95 to 1.05"),
            *("1.05 to 1.2", "1.2 to 2", "2 and more"),
        ),
        palette=_DIVERGING,
        meaning="policy ratio pi_theta / pi_prox, when the loss was computed",
        needs=("logprobs",),
    ),
    "advantage": _Quantity(
        values=lambda tokens: tokens["advantages"],
        edges=(-1.0, -0.5, -1e-6, 1e-6, 0.5, 1.0),
        labels=(
            *("advantage < -1", "-1 to -0.5", "-0.5 to 0", "0"),
            *("0 to 0.5", "0.5 to 1", "1 and more"),
        ),
        palette=_DIVERGING,
        meaning="advantage: reward compared with the group's",
        needs=("advantages",),
    ),
    "clipped": _Quantity(
        values=lambda tokens: tokens["clipped"],
        edges=(0.5,),
        labels=("not clipped", "clipped"),
        palette=(_NEUTRAL, "#d55e00"),
        meaning="whether the clip removed the gradient of the token",
        needs=("clipped",),
    ),
    "entropy": _Quantity(
        values=lambda tokens: tokens["entropy"],
        edges=(0.1, 0.5, 1.0, 2.0, 4.0),
        labels=(
            *("entropy < 0.1 nats", "0.1 to 0.5", "0.5 to 1", "1 to 2", "2 to 4"),
            "4 nats and more",
        ),
        palette=_CIVIDIS,
        meaning="entropy of the trainer's distribution at the token, in nats",
        needs=("entropy",),
    ),
    "probability": _Quantity(
        values=lambda tokens: -tokens["behavior_logprobs"],
        edges=tuple(-math.log(p) for p in (0.99, 0.9, 0.5, 0.1, 0.01)),
        labels=(
            *("probability > 0.99", "0.9 to 0.99", "0.5 to 0.9", "0.1 to 0.5", "0.01 to 0.1"),
            "0.01 and less",
        ),
        palette=_CIVIDIS,
        meaning="probability with which the engine sampled the token (values: -log of it, in nats)",
        needs=("behavior_logprobs",),
    ),
}
