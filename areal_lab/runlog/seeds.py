"""Runs of several losses with several seeds: reward curves with intervals, kept as JSON.

    {loss: runs, one a seed} --curves--> mean and 95 % interval of each step
                             --final_rewards--> held-out reward after training
                             --differences--> from one loss, seed by seed

An interval is of Student's t over the seeds: three seeds give honest, wide ones. Loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal

from areal_lab.config.given import given_path
from areal_lab.host.durable import replace_text
from areal_lab.host.foreign import Parsed, read_json
from areal_lab.runlog.intervals import MeanInterval, interval_of_runs, paired_interval, running_mean

if TYPE_CHECKING:
    import pandas as pd

RECORDED = Path(__file__).parent / "data" / "loss_seeds.json"
"""Runs of `areal-lab train tiny` with six losses, recorded by `python -m tools.loss_seeds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedRun:
    """One run: a loss with a seed."""

    loss: str
    """Name of the loss."""
    seed: int
    status: Literal["complete", "stopped", "failed"]
    rewards: tuple[float, ...]
    """Mean reward of the batch of each step."""
    held_out_before: float | None = None
    held_out_after: float | None = None
    lag_mean: float | None = None
    """Mean lag of trained tokens: versions between generation and training."""
    wall_s: float = 0.0
    folder: str = ""
    """The run folder; empty without one."""
    error: str = ""
    """Why it failed."""


@dataclass(frozen=True, slots=True)
class RewardCurve:
    """Mean over seeds of the smoothed reward, with its 95 % interval, by step."""

    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int


@dataclass(frozen=True, slots=True)
class SeedResults:
    """Runs of several losses with common seeds."""

    runs: tuple[SeedRun, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    """Provenance: command, versions, machine."""

    @property
    def losses(self) -> list[str]:
        """Names of the losses, in the order of their first runs."""
        return list(dict.fromkeys(run.loss for run in self.runs))

    @property
    def wall_s(self) -> float:
        """Total seconds of the runs."""
        return sum(run.wall_s for run in self.runs)

    def of(self, *losses: str) -> SeedResults:
        """Only the runs of these losses.

        Raises:
            KeyError: a loss has no run.
        """
        for name in losses:
            if name not in self.losses:
                raise KeyError(f"no run of {name!r}; there are {', '.join(self.losses)}")
        chosen = (run for name in losses for run in self.runs if run.loss == name)
        return SeedResults(tuple(chosen), self.about)

    def curves(self, *, window: int = 5) -> dict[str, RewardCurve]:
        """Reward by step of each loss, over its complete runs; losses without one are left out.

        Args:
            window: steps of the running mean that smooths a run before runs are averaged.

        Raises:
            ValueError: if the window is not positive.
        """
        if window < 1:
            raise ValueError(f"window is {window}, but must be >= 1 (steps)")
        found = {}
        for name, runs in self._complete().items():
            smooth = [running_mean(run.rewards, window) for run in runs]
            points = [interval_of_runs(values) for values in zip(*smooth, strict=True)]
            widths = [point.ci95 or 0.0 for point in points]
            found[name] = RewardCurve(
                steps=tuple(range(1, len(points) + 1)),
                mean=tuple(point.mean for point in points),
                low=tuple(point.mean - width for point, width in zip(points, widths, strict=True)),
                high=tuple(point.mean + width for point, width in zip(points, widths, strict=True)),
                seeds=len(runs),
            )
        return found

    def final_rewards(self) -> dict[str, MeanInterval]:
        """Held-out reward after training of each loss, over its complete runs."""
        return {name: interval_of_runs(_after(runs)) for name, runs in self._complete().items()}

    def start_reward(self) -> MeanInterval | None:
        """Held-out reward before training, over all seeds; None if it was not measured."""
        before = {run.seed: run.held_out_before for run in self.runs}
        known = [reward for reward in before.values() if reward is not None]
        return interval_of_runs(known) if known else None

    def differences(self, baseline: str) -> dict[str, MeanInterval]:
        """Held-out reward after training minus that of a baseline with the same seed.

        See `paired_interval`. Seeds that one of the two did not complete are left out, and losses
        without any that both did.

        Raises:
            KeyError: if the baseline has no run.
        """
        self.of(baseline)
        rewards = {
            name: dict(zip([run.seed for run in runs], _after(runs), strict=True))
            for name, runs in self._complete().items()
        }
        other = rewards.pop(baseline, {})
        found = {name: paired_interval(own, other) for name, own in rewards.items()}
        return {name: interval for name, interval in found.items() if interval is not None}

    def frame(self) -> pd.DataFrame:
        """One row per step of each run: loss, seed, step, reward. Needs pandas."""
        import pandas as pd

        rows = [
            (run.loss, run.seed, step, reward)
            for run in self.runs
            for step, reward in enumerate(run.rewards, 1)
        ]
        return pd.DataFrame(rows, columns=["loss", "seed", "step", "reward"])

    def save(self, path: Path) -> None:
        """Write the results as JSON, without the run folders, which exist on this machine only."""
        runs = [
            {**asdict(run), "rewards": [round(reward, 4) for reward in run.rewards], "folder": ""}
            for run in self.runs
        ]
        replace_text(path, _readable({**self.about, "runs": runs}))

    def _complete(self) -> dict[str, list[SeedRun]]:
        complete: dict[str, list[SeedRun]] = {}
        for run in self.runs:
            if run.status == "complete":
                complete.setdefault(run.loss, []).append(run)
        return complete


def load_seed_results(path: str | Path = RECORDED) -> SeedResults:
    """Read a file of `SeedResults.save`; without a path, the results in the package.

    Raises:
        ValueError: the file is not of this kind.
        OSError: it cannot be read.
    """
    path = given_path(path, "path")
    try:
        about = _ABOUT(read_json(path))
        return SeedResults(_RUNS(about.pop("runs", None)), about)
    except FileNotFoundError:
        raise
    except ValueError as error:
        raise ValueError(f"{path} has no results of seeds: {error}") from error


_ABOUT: Final = Parsed[dict[str, Any]](dict[str, Any])
_RUNS: Final = Parsed[tuple[SeedRun, ...]](tuple[SeedRun, ...])


def _after(runs: Iterable[SeedRun]) -> list[float]:
    """Held-out rewards after training; the last rewards of training where nothing is held out."""
    return [
        fmean(run.rewards[-5:]) if run.held_out_after is None else run.held_out_after
        for run in runs
    ]


def _readable(value: Mapping[str, Any]) -> str:
    """JSON with a line for each run, so diffs are small."""
    runs = value["runs"]
    head = json.dumps({name: one for name, one in value.items() if name != "runs"}, indent=1)
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    start = head.rstrip("}").rstrip()
    comma = "" if start.endswith("{") else ","
    return f'{start}{comma}\n "runs": [\n{lines}\n ]\n}}\n'
