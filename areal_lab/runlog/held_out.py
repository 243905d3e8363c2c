"""held_out.jsonl: held-out rewards that were measured outside of a training step.

{"version": 20, "reward": 0.71, "ci95": 0.05, "problems": 128, "unscored": 0,
 "versions": [20, 22], "later_tokens": 0.31, "mean_version": 20.4, "pass_at": {"4": 0.9}}

A measurement during training is for the version that the engines held when it began. Weight updates
interrupt it as they interrupt rollouts, so that some of its tokens may be of later versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from areal_lab.control.evaluation import Score
from areal_lab.control.events import Version
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.intervals import mean_interval

FILE: Final = "held_out.jsonl"
METRIC: Final = "held_out_reward"


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement."""

    version: Version
    """Version that the engines held at its beginning, and that it is for."""
    reward: float
    """Mean over problems."""
    ci95: float | None = None
    """Half-width of its confidence interval; None of a single problem."""
    problems: int = 0
    unscored: int = 0
    """Samples without a reward because the reward function failed or timed out."""
    versions: tuple[Version, ...] = ()
    """Oldest and newest version of its tokens; empty if that is not known."""
    later_tokens: float = 0.0
    """Share of its tokens that later versions sampled. With 0 it is exactly of `version`."""
    mean_version: float | None = None
    """Mean version of its tokens; None if that is not known."""
    pass_at: Mapping[str, float] = field(default_factory=dict)
    """pass@k by k: mean over the problems that have k scored samples."""

    @property
    def exact(self) -> bool:
        """Whether all tokens are of `version`."""
        return self.later_tokens == 0

    @property
    def score(self) -> Score:
        """What decides which checkpoint is the best."""
        return Score(self.reward, self.exact)

    def __str__(self) -> str:
        """`0.713 ± 0.051 (95 %, n = 128; 31 % of the tokens by versions 21 to 22)`."""
        width = "" if self.ci95 is None else f" ± {self.ci95:.3f}"
        notes = [f"{'95 %, ' if width else ''}n = {self.problems}", *self.labels()]
        return f"{self.reward:.3f}{width} ({'; '.join(notes)})"

    def labels(self) -> list[str]:
        """What a reader must know of the number: versions of its tokens, samples without score."""
        labels = []
        if not self.exact:
            newest = max(self.versions, default=self.version)
            first = self.version + 1
            later = f"version {first}" if newest == first else f"versions {first} to {newest}"
            labels.append(f"{self.later_tokens:.0%} of the tokens by {later}")
        if self.unscored:
            labels.append(f"{self.unscored} samples without a reward")
        return labels


def measured_of(
    version: Version,
    problem_means: Sequence[float],
    *,
    tokens: Mapping[Version, int] | None = None,
    unscored: int = 0,
    pass_at: Mapping[str, float] | None = None,
) -> Measured | None:
    """A measurement; None if no problem was scored.

    Args:
        version: that the engines held at its beginning.
        problem_means: mean reward of each held-out problem.
        tokens: number of its tokens by version; None if that is not known.
    """
    if not problem_means:
        return None
    interval, tokens = mean_interval(problem_means), tokens or {}
    total = sum(tokens.values())
    return Measured(
        version=version,
        reward=interval.mean,
        ci95=interval.ci95,
        problems=interval.n,
        unscored=unscored,
        versions=(min(tokens), max(tokens)) if tokens else (),
        later_tokens=sum(n for of, n in tokens.items() if of > version) / total if total else 0.0,
        mean_version=sum(of * n for of, n in tokens.items()) / total if total else None,
        pass_at=dict(pass_at or {}),
    )


def append_held_out(folder: Path, measured: Measured | None) -> None:
    """Append a measurement to the file of a run folder; nothing if it is None."""
    if measured is None:
        return
    line = {name: value for name, value in asdict(measured).items() if value not in ((), {}, None)}
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_held_out(folder: Path, metrics: Iterable[Mapping[str, Any]] = ()) -> list[Measured]:
    """The measurements of a run, one per version: of this file, and of its training steps.

    Of a version that was measured again, the exact measurement counts, else the last one.

    Args:
        folder: of the run.
        metrics: lines of metrics.jsonl.
    """
    found = {
        int(line["step"]): Measured(int(line["step"]), float(line[METRIC]))
        for line in metrics
        if METRIC in line
    }
    if (folder / FILE).is_file():
        for line in read_appended(folder / FILE).lines:
            one = _measured(json.loads(line))
            before = found.get(one.version)
            if before is None or one.exact or not before.exact:
                found[one.version] = one
    return [found[version] for version in sorted(found)]


def _measured(line: Mapping[str, Any]) -> Measured:
    """Of a line, also of an older run."""
    known = {one.name for one in fields(Measured)}
    values = {name: value for name, value in line.items() if name in known}
    return Measured(**{**values, "versions": tuple(line.get("versions", ()))})


def held_out_rewards(
    folder: Path, metrics: Iterable[Mapping[str, Any]]
) -> list[tuple[Version, float]]:
    """The held-out rewards of a run by version (`read_held_out`)."""
    return [(one.version, one.reward) for one in read_held_out(folder, metrics)]
