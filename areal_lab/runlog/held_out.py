"""held_out.jsonl: held-out rewards that were measured outside of a training step.

{"version": 0, "reward": 0.21, "ci95": 0.05, "problems": 32}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from areal_lab.control.events import Version
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.intervals import mean_interval

FILE: Final = "held_out.jsonl"
METRIC: Final = "held_out_reward"


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement."""

    version: Version
    """Of the weights that were measured."""
    reward: float
    """Mean over problems."""
    ci95: float | None
    """Half-width of its confidence interval; None of a single problem."""
    problems: int


def append_held_out(folder: Path, version: Version, problem_means: Sequence[float]) -> None:
    """Append a measurement; nothing if no problem was scored.

    Args:
        folder: of the run.
        version: of the weights that were measured.
        problem_means: mean reward of each held-out problem.
    """
    if not problem_means:
        return
    interval = mean_interval(problem_means)
    measured = Measured(version, interval.mean, interval.ci95, interval.n)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(measured)) + "\n")


def held_out_rewards(
    folder: Path, metrics: Iterable[Mapping[str, float]]
) -> list[tuple[Version, float]]:
    """All held-out rewards of a run, by version: of this file, and of its training steps.

    Args:
        folder: of the run.
        metrics: lines of metrics.jsonl.
    """
    found = {int(line["step"]): line[METRIC] for line in metrics if METRIC in line}
    if (folder / FILE).is_file():
        for line in read_appended(folder / FILE).lines:
            value = json.loads(line)
            found[int(value["version"])] = float(value["reward"])
    return sorted(found.items())
