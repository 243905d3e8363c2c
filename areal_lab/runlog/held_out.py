"""held_out.jsonl: held-out rewards measured outside of a training step.

{"version": 20, "reward": 0.71, "ci95": 0.05, "problems": 128, "unscored": 0,
 "versions": [20, 22], "later_tokens": 0.31, "mean_version": 20.4, "pass_at": {"4": 0.9}}

A measurement during training is for the version that the engines had at its start. Weight updates
interrupt it like rollouts, so some of its tokens may come from later versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from areal_lab.control.evaluation import Score
from areal_lab.control.events import Version
from areal_lab.host.durable import append_lines
from areal_lab.host.foreign import Parsed, parse_json
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.intervals import mean_interval
from areal_lab.runlog.records import Count

FILE: Final = "held_out.jsonl"
METRIC: Final = "held_out_reward"


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement."""

    version: Count
    """Version of the engines at its start, which is measured."""
    reward: float
    """Mean over problems."""
    ci95: float | None = None
    """Half-width of its confidence interval; None for a single problem."""
    problems: Count = 0
    unscored: Count = 0
    """Samples without a reward because the reward function failed or timed out."""
    versions: tuple[Count, ...] = ()
    """Oldest and newest version of its tokens; empty if unknown."""
    later_tokens: float = 0.0
    """Share of its tokens that later versions sampled. With 0 it is exactly of `version`."""
    mean_version: float | None = None
    """Mean version of its tokens; None if unknown."""
    pass_at: Mapping[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float] = field(
        default_factory=dict
    )
    """pass@k by k: mean over the problems that have k scored samples."""

    @property
    def exact(self) -> bool:
        """True if all tokens are of `version`."""
        return self.later_tokens == 0

    @property
    def score(self) -> Score:
        """Value by which the best checkpoint is chosen."""
        return Score(self.reward, self.exact)

    def __str__(self) -> str:
        """`0.713 ± 0.051 (95 %, n = 128; 31 % of the tokens by versions 21 to 22)`."""
        width = "" if self.ci95 is None else f" ± {self.ci95:.3f}"
        notes = [f"{'95 %, ' if width else ''}n = {self.problems}", *self.labels()]
        return f"{self.reward:.3f}{width} ({'; '.join(notes)})"

    def labels(self) -> list[str]:
        """Caveats for the reader: versions of its tokens, samples without score."""
        labels = []
        if not self.exact:
            newest = max(self.versions, default=self.version)
            first = self.version + 1
            later = f"version {first}" if newest == first else f"versions {first} to {newest}"
            labels.append(f"{self.later_tokens:.0%} of the tokens by {later}")
        if self.unscored:
            labels.append(f"{self.unscored} samples without a reward")
        return labels


_MEASURED: Final = Parsed[Measured](Measured)


@dataclass(frozen=True, slots=True)
class HeldOutReward:
    """Rewards on held-out problems."""

    problem_means: tuple[float, ...]
    """Mean reward of each problem's samples, over those that were scored."""
    unscored: int = 0
    """Samples without a reward because the reward function failed or timed out."""
    tokens: Mapping[Version, int] = field(default_factory=dict)
    """Response tokens by the version that sampled them; empty if that is not known."""
    pass_at: Mapping[str, float] = field(default_factory=dict)
    """pass@k by k, of problems with k scored samples."""

    def measured(self, version: Version) -> Measured | None:
        """The line of held_out.jsonl; None if no problem was scored.

        Args:
            version: that the engines held at the beginning.
        """
        if not self.problem_means:
            return None
        interval, tokens = mean_interval(self.problem_means), self.tokens
        total = sum(tokens.values())
        later = sum(n for of, n in tokens.items() if of > version)
        return Measured(
            version=version,
            reward=interval.mean,
            ci95=interval.ci95,
            problems=interval.n,
            unscored=self.unscored,
            versions=(min(tokens), max(tokens)) if tokens else (),
            later_tokens=later / total if total else 0.0,
            mean_version=sum(of * n for of, n in tokens.items()) / total if total else None,
            pass_at=self.pass_at,
        )


def append_held_out(folder: Path, measured: Measured | None) -> None:
    """Append a measurement to the file of a run folder; None appends nothing."""
    if measured is None:
        return
    line = {name: value for name, value in asdict(measured).items() if value not in ((), {}, None)}
    append_lines(folder / FILE, json.dumps(line) + "\n")


def read_held_out(folder: Path, metrics: Iterable[Mapping[str, Any]] = ()) -> list[Measured]:
    """Measurements of a run, one per version: from this file, and from its training steps.

    If a version was measured several times, an exact measurement counts, else the last one.
    """
    found = {
        int(line["step"]): Measured(int(line["step"]), float(line[METRIC]))
        for line in metrics
        if METRIC in line and "step" in line
    }
    file = folder / FILE
    if file.is_file():
        for number, line in enumerate(read_appended(file).lines, start=1):
            try:
                one = _MEASURED(parse_json(line))
            except ValueError as error:
                raise ValueError(f"line {number} of {file} cannot be read: {error}") from error
            before = found.get(one.version)
            if before is None or one.exact or not before.exact:
                found[one.version] = one
    return [found[version] for version in sorted(found)]


def held_out_rewards(
    folder: Path, metrics: Iterable[Mapping[str, Any]]
) -> list[tuple[Version, float]]:
    """The held-out rewards of a run by version (`read_held_out`)."""
    return [(one.version, one.reward) for one in read_held_out(folder, metrics)]
