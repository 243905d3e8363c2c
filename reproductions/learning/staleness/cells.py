"""Cells of a map of staleness: what a stale setting loses against synchronous runs of its seeds.

    runs --by setting, seed--> synchronous reward - stale reward = loss, beside what was logged

The synchronous run has the same learning rate, minibatches, objective and seed, so it sees the same
problems and begins with the same weights. A stale run without such a partner is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final, TypeAlias

from reproductions.learning.runs import Run
from reproductions.learning.setting import ORACLE, PRESET

MINIBATCHES: Final = "4"
"""Of a study without an axis for them: that of its config."""
_ETA: Final = {PRESET: 8.0}
"""What the studies set where the name of a staleness is no number."""
_GAIN: Final = 0.05
"""Least gain of the synchronous run of which a share is taken: some three standard errors of one
measurement of 1,024 problems."""
Setting: TypeAlias = tuple[str, str, str, str]
"""Learning rate, minibatches, staleness, objective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A setting, over the seeds that have a synchronous partner."""

    setting: Setting
    losses: Sequence[float]
    """Held-out reward of the synchronous run minus that of this one, by seed; positive is worse."""
    gain: float
    """What the synchronous runs gained over the start."""
    drift: float
    """Mean |log pi_theta - log pi_behav| of trained tokens."""
    synchronous_drift: float
    """The same of the synchronous runs."""
    clip_fraction: float
    lag: float
    """In versions."""

    @property
    def rate(self) -> float:
        """Learning rate."""
        return float(self.setting[0])

    @property
    def minibatches(self) -> int:
        """Optimizer steps per batch."""
        return int(self.setting[1])

    @property
    def eta(self) -> float:
        """The setting: inf has no bound."""
        staleness = self.setting[2]
        return _ETA[staleness] if staleness in _ETA else float(staleness)

    @property
    def objective(self) -> str:
        """`naive` or `decoupled`."""
        return self.setting[3]

    @property
    def is_stale(self) -> bool:
        """Whether it is another setting than its partner."""
        return self.setting[2] != ORACLE

    @property
    def loss(self) -> float:
        """Mean over seeds."""
        return fmean(self.losses)

    @property
    def error(self) -> float:
        """Standard error of the loss over seeds; nan for a single one."""
        seeds = len(self.losses)
        return stdev(self.losses) / math.sqrt(seeds) if seeds > 1 else math.nan

    @property
    def share(self) -> float | None:
        """Loss as a share of what the synchronous runs gained; None if that is near the noise."""
        return self.loss / self.gain if self.gain >= _GAIN else None

    @property
    def name(self) -> str:
        """`naive, rate 3e-4, 16 minibatches, eta 8`."""
        rate, minibatches, staleness, objective = self.setting
        eta = f"eta {staleness}" if staleness not in _ETA else staleness
        return f"{objective}, rate {rate}, {counted(int(minibatches), 'minibatch', 'es')}, {eta}"


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of a study."""

    stale: Sequence[Cell]
    synchronous: Sequence[Cell]
    left_out: int = 0
    """Stale runs without a synchronous partner."""


Predictor: TypeAlias = Callable[[Cell], float]
PREDICTORS: Final[Mapping[str, Predictor]] = {
    "drift": lambda cell: cell.drift,
    "drift beyond that at eta 0": lambda cell: cell.drift - cell.synchronous_drift,
    "clip fraction": lambda cell: cell.clip_fraction,
    "lag": lambda cell: cell.lag,
    "eta": lambda cell: cell.eta,
    "rate x minibatches x lag": lambda cell: cell.rate * cell.minibatches * cell.lag,
}
"""What may tell how much a stale run loses: all but the second without a synchronous one."""


def counted(number: int, noun: str, ending: str = "s") -> str:
    """`1 minibatch`, `4 minibatches`."""
    return f"{number} {noun}{'' if number == 1 else ending}"


def setting_of(run: Run) -> Setting:
    """The setting of a run."""
    choice = run.choice
    minibatches = choice.get("minibatches", MINIBATCHES)
    return choice["rate"], minibatches, choice["staleness"], choice["objective"]


def cells_of(runs: Sequence[Run]) -> Cells:
    """Cells in the order of the runs, each over its seeds."""
    by_setting: dict[Setting, dict[int, Run]] = {}
    for run in runs:
        by_setting.setdefault(setting_of(run), {})[run.seed] = run
    cells, left_out = list[Cell](), 0
    for setting, own in by_setting.items():
        rate, minibatches, _, objective = setting
        partners = by_setting.get((rate, minibatches, ORACLE, objective), {})
        pairs = [(run, partners[seed]) for seed, run in own.items() if seed in partners]
        left_out += len(own) - len(pairs)
        if pairs:
            cells.append(_cell(setting, pairs))
    return Cells(
        [cell for cell in cells if cell.is_stale],
        [cell for cell in cells if not cell.is_stale],
        left_out,
    )


def apart_from(runs: Sequence[Run], others: Sequence[Run]) -> Cells:
    """Stale cells of settings that `others` do not have, from seeds that they do not have.

    Without the seeds a longer run would test what its own first steps have made.
    """
    seeds = {run.seed for run in others}
    settings: Collection[Setting] = {setting_of(run) for run in others}
    found = cells_of([run for run in runs if run.seed not in seeds])
    stale = [cell for cell in found.stale if cell.setting not in settings]
    return Cells(stale, found.synchronous, found.left_out)


def noise(cells: Sequence[Cell]) -> float:
    """Standard error of a cell's loss: the root mean square over the cells; nan without seeds."""
    errors = [cell.error for cell in cells if not math.isnan(cell.error)]
    return math.sqrt(fmean(error**2 for error in errors)) if errors else math.nan


def objective_noise(runs: Sequence[Run]) -> float:
    """Root mean square difference of the objectives' rewards at eta 0, where they are the same.

    nan without runs of both.
    """
    rewards: dict[tuple[str, str, int], list[float]] = {}
    for run in runs:
        rate, minibatches, staleness, _ = setting_of(run)
        if staleness == ORACLE:
            rewards.setdefault((rate, minibatches, run.seed), []).append(run.reward)
    pairs = [own for own in rewards.values() if len(own) == 2]
    return math.sqrt(fmean((one - other) ** 2 for one, other in pairs)) if pairs else math.nan


def _cell(setting: Setting, pairs: Sequence[tuple[Run, Run]]) -> Cell:
    return Cell(
        setting=setting,
        losses=[partner.reward - run.reward for run, partner in pairs],
        gain=fmean(partner.reward - partner.before for _, partner in pairs),
        drift=fmean(run.drift for run, _ in pairs),
        synchronous_drift=fmean(partner.drift for _, partner in pairs),
        clip_fraction=fmean(run.clip_fraction for run, _ in pairs),
        lag=fmean(run.lag for run, _ in pairs),
    )
