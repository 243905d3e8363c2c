"""Rewards of 0 and 1 as tiles to click: prompts in rows, samples in columns.

A  1 . . . . . . .    1 of 8 right
B  1 1 1 1 . . . .    4 of 8 right
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import altair as alt

from areal_lab.widgets.chart_parts import BLUE, GREY, on_page, plain_axis, quickly, table, words

_SELECTION: Final = "right"

Rewards = Sequence[Sequence[float]]
"""One row per prompt, 0 or 1 for each of its samples."""


@quickly()
def reward_table(
    rewards: Rewards,
    *,
    names: Sequence[str],
    lengths: Sequence[Sequence[int]] | None = None,
    tile_height: int = 40,
) -> alt.TopLevelMixin:
    """Tiles of rewards; a click turns a right response into a wrong one and back.

    In a notebook, show it with `mo.ui.altair_chart`, whose `selections` `clicked_rewards` reads.
    `rewards` are the initial tiles, 0 or 1.
    """
    samples = check_rewards(rewards, names)
    if lengths is not None and [len(row) for row in lengths] != [samples] * len(rewards):
        raise ValueError(f"lengths must have {len(rewards)} rows of {samples}, as the rewards")
    rows = [
        {
            "prompt": name,
            "sample": number + 1,
            "tokens": str(lengths[i][number]) if lengths is not None else "",
        }
        for i, name in enumerate(names)
        for number in range(samples)
    ]
    start: list[dict[str, str | float]] = [
        {"prompt": name, "sample": number + 1}
        for name, row in zip(names, rewards, strict=True)
        for number, reward in enumerate(row)
        if reward
    ]
    picked = alt.selection_point(
        name=_SELECTION,
        fields=["prompt", "sample"],
        toggle="true",
        empty=False,
        clear=False,
        value=start,
    )
    base = alt.Chart(table(rows)).encode(**_places(names, samples))
    tiles = base.mark_rect(cornerRadius=5, stroke=GREY, strokeWidth=1, cursor="pointer").encode(
        color=alt.when(picked).then(alt.value(BLUE)).otherwise(alt.value("transparent")),
    )
    mark = words(base, fontSize=15, fontWeight="bold", dy=-5 if lengths is not None else 0)
    layers: list[Any] = [
        tiles.add_params(picked),
        mark.encode(text=alt.when(picked).then(alt.value("1")).otherwise(alt.value("0"))),
        _counts(base, picked, names, samples),
    ]
    if lengths is not None:
        layers.insert(2, words(base, fontSize=10, dy=11).encode(text=alt.Text("tokens:N")))
    return on_page(
        alt.layer(*layers).configure_view(stroke=None),
        height=tile_height * len(rewards),
    )


def clicked_rewards(
    selections: Mapping[str, Any], start: Rewards, *, names: Sequence[str]
) -> list[list[float]]:
    """Rewards after clicks, from `mo.ui.altair_chart(...).selections`; the start before any
    click.
    """
    samples = check_rewards(start, names)
    if _SELECTION not in selections:
        return [[float(reward) for reward in row] for row in start]
    points = selections[_SELECTION].get("vlPoint", {}).get("or", [])
    right = {(point["prompt"], int(point["sample"])) for point in points}
    return [[float((name, k + 1) in right) for k in range(samples)] for name in names]


def check_rewards(rewards: Rewards, names: Sequence[str]) -> int:
    """Number of samples of each prompt."""
    lengths = {len(row) for row in rewards}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"rewards has rows of {sorted(lengths)} samples, but all must have the same"
        )
    if len(set(names)) != len(rewards):
        raise ValueError(f"names has {len(set(names))} names for {len(rewards)} prompts")
    if any(reward not in (0, 1) for row in rewards for reward in row):
        raise ValueError("rewards has an entry that is not 0 or 1")
    return lengths.pop()


def _places(names: Sequence[str], samples: int) -> dict[str, Any]:
    plain = {"title": None, "ticks": False, "domain": False}
    return {
        "x": alt.X(
            "sample:O",
            sort=list(range(1, samples + 1)),
            scale=alt.Scale(paddingInner=0.08, paddingOuter=0),
            axis=plain_axis(**plain, orient="top", labelAngle=0),
        ),
        "y": alt.Y(
            "prompt:N",
            sort=list(names),
            scale=alt.Scale(paddingInner=0.12, paddingOuter=0),
            axis=plain_axis(**plain, labelFontWeight="bold", labelFontSize=14),
        ),
    }


def _counts(
    base: alt.Chart,
    picked: alt.Parameter,
    names: Sequence[str],
    samples: int,
) -> Any:
    """Number of right samples, next to each row: counted on the page after each click."""
    counted = (
        base.transform_calculate(hit=f"vlSelectionTest('{picked.name}_store', datum) ? 1 : 0")
        .transform_aggregate(right="sum(hit)", groupby=["prompt"])
        .transform_calculate(said=f"datum.right + ' of {samples}'")
    )
    return words(counted, align="left", dx=8).encode(
        x=alt.value("width"),
        y=alt.Y("prompt:N", sort=list(names)),
        text=alt.Text("said:N"),
    )
