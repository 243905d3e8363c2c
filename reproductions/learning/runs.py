"""The runs of a study: each cell of a sweep of `areal-lab cosim` in a few numbers, as JSON.

    studies/NAME.yaml --areal-lab sweep--> sweeps/NAME --read--> runs --> results/table_2.json

A sweep that is complete is only read. The reward of a run is that of its newest weights on held-out
problems, one sample of each at temperature 1, averaged over the last quarter of its steps: a
single measurement of 1,024 problems has a standard error of 0.015.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeAlias

from areal_lab.cli.sweep import run_sweep
from areal_lab.sweep.read import RecordedSweep, SweepCell, read_sweep
from areal_lab.sweep.study import load_study, shown
from benchmarks.harness import Arguments

Data: TypeAlias = Mapping[str, Any]
"""The runs of a reproduction, as its results/NAME.json holds them."""
STUDIES: Final = Path(__file__).parents[1] / "studies"
_LAST: Final = 0.75
"""Share of the steps before those that the reward of a run is of."""
_SETTLED: Final = 0.5
"""The same of what is logged by step; drift and lag grow at first."""
_DIGITS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run."""

    choice: Mapping[str, str]
    """Its values on the axes of the study but for the seed."""
    seed: int
    before: float
    """Held-out reward before training."""
    reward: float
    """Held-out reward over the last quarter of the steps."""
    drift: float
    """Mean |log pi_theta - log pi_behav| of trained tokens, over the last half of the steps."""
    lag: float
    """In versions, of trained tokens; over the last half of the steps."""
    clip_fraction: float
    """Share of tokens that the clip leaves without a gradient; over the last half of the steps."""
    steps: int
    hours: float
    """Simulated, of the whole run."""
    cpu_s: float
    """CPU seconds of the whole run, on the machine that ran it."""
    curve: Sequence[tuple[int, float, float]]
    """Step, simulated hours, held-out reward."""
    training: Sequence[float]
    """Mean reward of the batch at the steps of `curve` after the first."""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Run:
        """What `to_json` wrote."""
        curve = [(int(step), hours, reward) for step, hours, reward in record["curve"]]
        return cls(**{**record, "curve": curve})

    def to_json(self) -> dict[str, Any]:
        """The JSON object, with five digits."""
        return {name: _rounded(value) for name, value in asdict(self).items()}

    def hours_to(self, reward: float) -> float:
        """Simulated hours until the held-out reward stays at `reward` or above on average.

        The curve is smoothed over three measurements and taken as linear between them; inf if it
        does not get there.
        """
        smooth = [
            (hours, fmean(one[2] for one in self.curve[max(0, place - 1) : place + 2]))
            for place, (_, hours, _) in enumerate(self.curve)
        ]
        for (before_h, before), (after_h, after) in pairwise(smooth):
            if after >= reward:
                share = 0.0 if after <= before else max(0.0, (reward - before) / (after - before))
                return before_h + share * (after_h - before_h)
        return math.inf


def perform(study: str, overrides: Sequence[str] = ()) -> list[Run]:
    """Run the cells of a study that are not complete, and read them all.

    Args:
        study: name of a file of `reproductions/studies`.
        overrides: as for `areal-lab sweep`.

    Raises:
        SystemExit: a cell failed, or the sweep was stopped; it continues when called again.
    """
    path = STUDIES / f"{study}.yaml"
    if code := run_sweep(str(path), overrides, as_json=False):
        raise SystemExit(code)
    return read(read_sweep(load_study(path, overrides).folder))


def seeds(arguments: Arguments, most: int | None = None) -> list[str]:
    """The override of a study for `--repeats` seeds, or for fewer."""
    count = min(arguments.repeats, most or arguments.repeats)
    return [f"grid.seed={list(range(1, count + 1))}"]


def quick(name: str) -> list[str]:
    """Overrides of a study for `--quick`: runs of some seconds in a folder of their own."""
    return [
        f"folder=sweeps/quick/{name}",
        "settings.total_train_steps=4",
        "settings.eval_every_steps=1",
        "settings.evaluation.max_problems=64",
    ]


def read(sweep: RecordedSweep) -> list[Run]:
    """The complete runs of a sweep."""
    return [_run(row) for row in sweep.rows if row.complete]


def run_of(folder: Path, choice: Mapping[str, str], seed: int) -> Run:
    """The run of a complete run folder of `areal-lab cosim`.

    Args:
        folder: with held-out rewards.
        choice: its values on the axes of a study.
        seed: that it ran with.
    """
    lines = [json.loads(one) for one in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    steps, before = len(lines), summary["reward_before"]["mean"]
    settled = [one for one in lines if one["step"] > _SETTLED * steps]
    measured = [one for one in lines if "held_out_reward" in one]

    def mean(name: str) -> float:
        # A batch whose rewards are all alike has no gradient, and no such metrics.
        return fmean([one[name] for one in settled if name in one] or [0.0])

    return Run(
        seed=seed,
        choice=choice,
        before=before,
        reward=fmean(one["held_out_reward"] for one in measured if one["step"] > _LAST * steps),
        drift=mean("drift"),
        lag=mean("lag_token_mean"),
        clip_fraction=mean("clip_fraction"),
        steps=steps,
        hours=summary["simulated_hours"],
        cpu_s=json.loads((folder / "env.json").read_text())["cpu_s"],
        curve=[
            (0, 0.0, before),
            *((one["step"], one["simulated_hours"], one["held_out_reward"]) for one in measured),
        ],
        training=[one["reward_mean"] for one in measured],
    )


def _run(cell: SweepCell) -> Run:
    folder = cell.stored.run_folder
    assert folder is not None, "co-simulated runs have folders"
    choice = {name: shown(value) for name, value in cell.choice.items()}
    return run_of(folder, choice, int(choice.pop("seed")))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value
