"""Settings of the number of engines while a run continues."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt, Lt

from areal_lab.config.record import About, Count, Record, Whole


class ScalingConfig(Record):
    """Engines join and leave while the run continues (`areal_lab.control.scaling`)."""

    max_engines: Annotated[Whole, About(unit="engines", hint="0 keeps the engines")] = 0
    """Most engines; 0 keeps the number that the run started with."""
    min_engines: Annotated[Count, About(unit="engines")] = 1
    """Fewest engines. Needs `max_engines`."""
    window_steps: Count = 4
    """Training steps that one decision looks at."""
    cooldown_steps: Whole = 1
    """Training steps after a change that no decision looks at, in addition to those in which the
    groups end that were in flight."""
    tolerance: Annotated[float, Gt(0), Lt(1)] = 0.05
    """Share of the time that the trainer may wait for groups before an engine joins. Below half of
    it, with groups that wait for training, engines leave."""
