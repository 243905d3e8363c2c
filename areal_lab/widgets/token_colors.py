"""Tokens colored by a quantity: bins with a color and a label each, as cells of `Strip` or HTML.

Responses as text with a colored background for each token: HTML for notebooks.

    sample 2   reward 1.67, advantage +0.84, 31 tokens of versions 3 to 5
    |Rain| falls| on| the| roof|,| ...

Letters are black or white on colors, and the page's own on what is neutral, so that light and dark
pages both read well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.runlog.token_columns import Tokens

if TYPE_CHECKING:
    import pandas as pd


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
    """`[T]`; nan without a value."""
    codes: NDArray[np.uint8]
    """`[T]`: index into `colors`."""
    colors: tuple[str, ...]
    labels: tuple[str, ...]
    """Meaning of each color, with its unit."""
    meaning: str
    """Definition of the quantity in a sentence."""

    def rows(self, tokens: Tokens, samples: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Codes of some samples, one array each."""
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
    """Quantities by which the tokens of a run can be colored, in a sensible order."""
    known = [name for name, one in _BINNED.items() if all(need in tokens for need in one.needs)]
    return ["lag", "version", *known]


def token_colors(tokens: Tokens, quantity: str) -> TokenColors:
    """Bin a quantity of the tokens and give each bin a color."""
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
    """Label of tokens without a value; empty, and so not listed, if there are none."""
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


MOST_TOKENS: Final = 5000
"""Maximum tokens to show: a browser is slow with more elements."""
_GRID: Final = (
    "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1em 1.5em"
)
"""Adjacent samples if there is room."""
_SOLID: Final = re.compile("#[0-9a-f]{6}")
_BRIGHT: Final = 0.179
"""Relative luminance above which black letters have more contrast than white ones: 4.6 and more."""


def token_text(
    tokens: Tokens,
    samples: Sequence[int],
    colors: TokenColors,
    *,
    heads: Sequence[str] | None = None,
    most_tokens: int = MOST_TOKENS,
    marked: tuple[int, int] | None = None,
) -> str:
    """Text of some samples as HTML, below a legend of the colors that occur.

    The pointer on a token shows its text, its place and its color's label. Tokens of a run without
    texts are shown by their ids.
    """
    heads = [""] * len(samples) if heads is None else list(heads)
    if len(heads) != len(samples):
        raise ValueError(f"got {len(heads)} heads for {len(samples)} samples; give one per sample")
    parts, left = [], most_tokens
    for sample, head in zip(samples, heads, strict=True):
        if left <= 0:
            break
        at = marked[1] if marked is not None and marked[0] == sample else None
        line = f'<div style="margin-bottom:.2em;font-size:.85em">{escape(head)}</div>'
        text = _paragraph(tokens, sample, colors, left, at)
        parts.append(f"<div>{line if head else ''}{text}</div>")
        left -= _length(tokens, sample)
    shown = most_tokens - max(left, 0)
    everything = sum(_length(tokens, sample) for sample in samples)
    rest = (
        f'<div style="margin-top:.9em;font-size:.85em">{shown:,} of {everything:,} tokens are '
        "shown; select fewer samples to see the others.</div>"
    )
    return (
        f'<div style="line-height:1.7">{_legend(colors, tokens, samples)}<div style="{_GRID}">'
        f"{''.join(parts)}</div>{rest if shown < everything else ''}</div>"
    )


def heads_of(samples: pd.DataFrame) -> list[str]:
    """A line for each sample: its origin, reward, advantage and tokens."""
    return [_head(sample) for sample in samples.to_dict("records")]


def _head(sample: Mapping[str, Any]) -> str:
    first, last = sample["head_version"], sample["tail_version"]
    advantage = sample.get("advantage", math.nan)
    parts = [
        f"group {sample['group']}, sample {sample['sample']}, step {sample['step']}",
        f"reward {sample['reward']:.3g}",
        *([] if math.isnan(advantage) else [f"advantage {advantage:+.2f}"]),
        f"{sample['tokens']} tokens",
        f"version {first}" if first == last else f"versions {first} to {last}",
        f"ended by {sample['finish_reason']}",
    ]
    return " \N{MIDDLE DOT} ".join(parts)


def _paragraph(
    tokens: Tokens, sample: int, colors: TokenColors, most: int, marked: int | None
) -> str:
    labels = tokens.labels(sample)[:most]
    texts = tokens.texts(sample) if tokens.has_text(sample) else [f"{label} " for label in labels]
    codes = colors.codes[tokens.of(sample)]
    spans = [
        _span(text, label, int(code), colors, position, outlined=position == marked)
        for position, (text, label, code) in enumerate(zip(texts, labels, codes, strict=False))
    ]
    return (
        '<div style="white-space:pre-wrap;overflow-wrap:anywhere;'
        f'font-family:ui-monospace,monospace;font-size:.9em">{"".join(spans)}</div>'
    )


def _span(
    text: str, label: str, code: int, colors: TokenColors, position: int, *, outlined: bool
) -> str:
    meaning = colors.labels[code]
    quoted = f"\N{LEFT DOUBLE QUOTATION MARK}{label}\N{RIGHT DOUBLE QUOTATION MARK}"
    title = escape(f"{quoted}, token {position}" + (f": {meaning}" if meaning else ""))
    if not text:
        # Special tokens by name, parts of characters as a mark.
        text = label if label.startswith("<") else "\N{MIDDLE DOT}"
    text = text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n")
    style = _style(colors.colors[code]) + (";outline:2px solid currentColor" if outlined else "")
    return f'<span style="{style}" title="{title}">{escape(text)}</span>'


def _legend(colors: TokenColors, tokens: Tokens, samples: Sequence[int]) -> str:
    occurring = {int(code) for sample in samples for code in colors.codes[tokens.of(sample)]}
    items = [
        f'<span style="{_style(color)};padding:.1em .4em;margin-right:.5em;white-space:nowrap">'
        f"{escape(label)}</span>"
        for code, (color, label) in enumerate(zip(colors.colors, colors.labels, strict=True))
        if code in occurring and label
    ]
    return f'<div style="font-size:.8em;line-height:2">{" ".join(items)}</div>'


def _style(color: str) -> str:
    if not _SOLID.fullmatch(color):
        return f"background:{color}"
    return f"background:{color};color:{'#000' if _luminance(color) > _BRIGHT else '#fff'}"


def _luminance(color: str) -> float:
    """Relative luminance of #rrggbb, from 0 to 1 (WCAG 2)."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _length(tokens: Tokens, sample: int) -> int:
    own = tokens.of(sample)
    return int(own.stop) - int(own.start)
