"""Colors of activities and patterns of idle causes, the same in every picture and widget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from areal_lab.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
)
from areal_lab.runlog.activity import (
    LOST,
    NOT_IN_THE_LOG,
    NOT_JOINED,
    NOTHING_ADMITTED,
    NOTHING_LEFT,
    ON_ITS_WAY,
    PAUSED,
    PAUSED_BY_HAND,
    PAUSED_FOR_TRAINING,
    RETIRED,
    TRAIN_ON_ITS_WAY,
    WAIT_BATCH,
    WAIT_CONTROLLER,
    WAIT_RANKS,
    WAIT_REWARDS,
    WAIT_WEIGHTS,
    label,
)
from areal_lab.runlog.time_cells import State

if TYPE_CHECKING:
    from matplotlib.patches import Patch

_BUSY: Final[Mapping[str, str]] = {
    "decode": BLUE,
    "generate": BLUE,
    "prefill and decode": SKY,
    "prefill": "#44AA99",
    "recompute": "#999933",
    "load weights": BLACK,
    "forward/backward": ORANGE,
    "train": ORANGE,
    "proximal log-probs": YELLOW,
    "optimizer": VERMILION,
    "export weights": PURPLE,
    "switch to training": "#882255",
    "save": "#6A3D9A",
    "judge": GREEN,
}
_OTHER_BUSY: Final = ("#B15928", "#AA4499", "#661100", "#332288", "#117733")


class IdleLook(NamedTuple):
    """Look of an idle cause: by pattern, not by hue."""

    face: str
    """Color of a picture's patch."""
    hatch: str
    cell: str
    """Color of a widget's cell: greys that are visible on light and dark pages."""


_IDLE: Final[Mapping[str, IdleLook]] = {
    WAIT_BATCH: IdleLook("#DDDDDD", "", "#80808045"),
    NOTHING_ADMITTED: IdleLook("#FFFFFF", "...", "#808080 ."),
    WAIT_WEIGHTS: IdleLook("#FFFFFF", "////", "#808080 /"),
    PAUSED: IdleLook("#FFFFFF", "xxxx", "#808080 x"),
    PAUSED_FOR_TRAINING: IdleLook("#DDDDDD", "xx", "#80808090 x"),
    PAUSED_BY_HAND: IdleLook("#DDDDDD", "oo", "#808080 +"),
    WAIT_REWARDS: IdleLook("#FFFFFF", "\\\\\\\\", "#808080 \\"),
    WAIT_CONTROLLER: IdleLook("#DDDDDD", "..", "#80808060 ."),
    WAIT_RANKS: IdleLook("#DDDDDD", "--", "#80808060 -"),
    ON_ITS_WAY: IdleLook("#AAAAAA", "", "#80808090"),
    TRAIN_ON_ITS_WAY: IdleLook("#AAAAAA", "", "#80808090"),
    NOTHING_LEFT: IdleLook("#FFFFFF", "----", "#808080 -"),
    LOST: IdleLook("#FFFFFF", "||||", "#808080 |"),
    NOT_JOINED: IdleLook("#F2F2F2", "", "#80808020"),
    RETIRED: IdleLook("#F2F2F2", "||", "#80808020 |"),
    NOT_IN_THE_LOG: IdleLook("#F2F2F2", "++", "#80808020 +"),
}
_OTHER_IDLE: Final = IdleLook("#FFFFFF", "++", "#80808090 +")
_NEEDS_WHITE: Final = frozenset({BLUE, PURPLE, VERMILION, "#882255", "#6A3D9A", "#332288"})


class Looks:
    """Look of each state of a picture, in the order of its legend: busy ones first.

    Attributes:
        of: keyword arguments of a patch, by state; blank states have none.
    """

    def __init__(
        self, sizes: Mapping[State, float], *, named: Callable[[str], str] = label
    ) -> None:
        """Choose looks."""
        self._sizes, self._named = dict(sizes), named
        ordered = sorted(
            (state for state in sizes if not state.blank),
            key=lambda state: (not state.busy, -sizes[state]),
        )
        unknown = [state.name for state in ordered if state.busy and state.name not in _BUSY]
        others = {name: _OTHER_BUSY[n % len(_OTHER_BUSY)] for n, name in enumerate(unknown)}
        self._colors = {**_BUSY, **others}
        self.of: dict[State, dict[str, Any]] = {}
        for state in ordered:
            if state.busy:
                self.of[state] = {"facecolor": self._colors[state.name], "linewidth": 0}
            else:
                face, hatch, _ = _IDLE.get(state.name, _OTHER_IDLE)
                edge = {"edgecolor": "#777777", "hatch": hatch, "linewidth": 0}
                self.of[state] = {"facecolor": face, **edge}

    def text_is_white(self, state: State) -> bool:
        """Return whether text on it must be white; on black it is in a box."""
        return self.of[state]["facecolor"] in _NEEDS_WHITE

    def cell_color(self, state: State) -> str:
        """Color of a cell of `areal_lab.widgets.strip`."""
        if state.blank:
            return "transparent"
        if not state.busy:
            return _IDLE.get(state.name, _OTHER_IDLE).cell
        color = self._colors[state.name]
        return "currentColor" if color == BLACK else color

    def cell_label(self, state: State) -> str:
        """Label of a cell in the widget's legend; empty for a blank one."""
        return "" if state.blank else _labeled([self._named(state.name)], busy=state.busy)

    def legend(self, *, least: float = 0.0) -> tuple[list[Patch], list[str]]:
        """Handles and labels; states with the same look are one entry, small ones are left out."""
        from matplotlib.patches import Patch

        alike: dict[tuple[Any, ...], list[State]] = {}
        for state, look in self.of.items():
            alike.setdefault(tuple(look.items()), []).append(state)
        shown = [some for some in alike.values() if sum(self._sizes[one] for one in some) >= least]
        labels = [
            _labeled([self._named(one.name) for one in some], busy=some[0].busy) for some in shown
        ]
        return [Patch(**self.of[some[0]]) for some in shown], labels


def _labeled(names: list[str], *, busy: bool) -> str:
    """Text of a legend entry; a name that is part of another one is omitted."""
    kept = [name for name in names if not any(name in other for other in names if other != name)]
    kept = list(dict.fromkeys(kept))
    return " or ".join(kept) if busy else f"idle: {' or '.join(kept)}"
