"""Responses as text with a colored background for each token: HTML for notebooks.

    sample 2   reward 1.67, advantage +0.84, 31 tokens of versions 3 to 5
    |Rain| falls| on| the| roof|,| ...

Letters are black or white on colors, and the page's own on what is neutral, so that light and dark
pages both read well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from areal_lab.runlog.tokens.columns import Tokens
from areal_lab.widgets.token_colors import TokenColors

if TYPE_CHECKING:
    import pandas as pd

MOST_TOKENS: Final = 5000
"""Shown at most: a browser is slow with more elements."""
_GRID: Final = (
    "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1em 1.5em"
)
"""Samples side by side where there is room."""
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
    """The text of some samples as HTML, below a legend of the colors that occur.

    The pointer on a token shows its text, its place and its color's label.

    Args:
        tokens: of a run with texts; where it has none, tokens are shown by their ids.
        samples: rows of the samples to show.
        colors: of the tokens.
        heads: a line of text above each sample.
        most_tokens: what is beyond is left out, with a line that says so.
        marked: sample and position of a token to outline.

    Raises:
        ValueError: if there is not one head per sample.
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
    """A line for each sample: where it is from, its reward, its advantage, its tokens.

    Args:
        samples: rows of `RecordedRun.samples`.
    """
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
