"""Calibrate a named trainer with measured training steps: a factor, with more rows a fixed time.

    CSV: seconds, tokens and sequences, ...  --cost model x factor + fixed time--> settings

Columns, in any order and case; only the first is always needed:

    seconds             of the training step
    tokens, sequences   of its batch: all tokens of prompts and responses; sequences are alike
    lengths             instead of these two: tokens of each sequence, separated by spaces
    gpus                that train; without it, those of the settings
    micro_batch_tokens, minibatches   likewise

The layout, the model and the kind of trainer come from the settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.config.unknown import plain
from areal_lab.host.foreign import read_table_text, table_cells
from areal_lab.host.terminal import printable
from simulator.calibrate.fit_run import own_settings
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.costs.training import training_cost
from simulator.stats.least_squares import fit_positive
from simulator.workload.recorded_run import Value

Values = NDArray[np.float64]
_ALIKE: Final = 1.25
"""Least ratio of the longest to the shortest step from which a fixed time is fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One row."""

    row: int
    """Line of the file."""
    seconds: float
    lengths: Sequence[int]
    gpus: int
    micro_batch_tokens: int
    minibatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTableFit:
    """Fit of a named trainer to measured steps."""

    source: Path
    kind: str
    time_factor: float
    fixed_s: float
    measured_s: Values
    predicted_s: Values
    left_out: Values
    """Predicted / measured - 1 of each row by a fit without it; empty with fewer than 3 rows."""
    own: Mapping[str, Value]
    """The user's settings."""

    @property
    def about(self) -> str:
        """One line, for reports."""
        rows = len(self.measured_s)
        kind = f"{self.kind} fitted to {rows} step{'s' * (rows > 1)}"
        return printable(f"{kind} of {self.source.name}")

    @property
    def error(self) -> float:
        """Mean absolute relative error on rows left out; 0 if unknown."""
        return float(np.abs(self.left_out).mean()) if self.left_out.size else 0.0

    @property
    def settings(self) -> dict[str, Value]:
        """Settings for `simulate`, by dotted name."""
        return {
            **self.own,
            "trainer.kind": self.kind,
            "trainer.time_factor": float(f"{self.time_factor:.6g}"),
            "trainer.fixed_s": float(f"{self.fixed_s:.6g}"),
            "calibration.source": self.about,
            "calibration.training_error": float(f"{self.error:.4g}"),
        }

    def lines(self) -> list[str]:
        """The result in lines for the user."""
        found = [
            f"{self.about}: factor {self.time_factor:.3g}, {self.fixed_s:.3g} s per step",
            *(
                f"  measured {measured:.4g} s, predicted {predicted:.4g} s "
                f"({predicted / measured - 1:+.1%})"
                for measured, predicted in zip(self.measured_s, self.predicted_s, strict=True)
            ),
        ]
        if self.left_out.size:
            found.append(f"error of rows left out of the fit: {self.error:.1%}")
        else:
            found.append("fewer than 3 rows: the error is unknown")
        return found

    def to_json(self) -> dict[str, Any]:
        """The fit as one JSON object; errors are relative."""
        return {
            "source": str(self.source),
            "settings": self.settings,
            "measured_s": self.measured_s.tolist(),
            "predicted_s": self.predicted_s.tolist(),
            "left_out_errors": self.left_out.tolist(),
        }

    def to_yaml(self) -> str:
        """A file for `areal-lab simulate`."""
        from omegaconf import OmegaConf

        nested = OmegaConf.create({})
        for name, value in self.settings.items():
            OmegaConf.update(nested, name, value)
        return "".join(f"# {line}\n" for line in self.lines()) + OmegaConf.to_yaml(nested)


def fit_step_table(source: Path, overrides: Sequence[str] = ()) -> StepTableFit:
    """Fit the trainer of the settings to a table."""
    config = load_simulation(None, tuple(overrides))
    return fit_steps(source, read_steps(source, config), config, own=own_settings(overrides))


def fit_steps(
    source: Path,
    steps: Sequence[MeasuredStep],
    config: SimulationConfig,
    *,
    own: Mapping[str, Value],
) -> StepTableFit:
    """Fit the trainer of a config to measured steps; `own` are settings of the result."""
    measured = np.array([one.seconds for one in steps])
    shares = np.array([_shares(config, one) for one in steps])
    best = _fit(shares, measured)
    left_out = np.array([])
    if len(steps) >= 3:
        left_out = np.array(
            [
                _predict(_fit(np.delete(shares, k, 0), np.delete(measured, k)), shares[k : k + 1])[
                    0
                ]
                / measured[k]
                - 1
                for k in range(len(steps))
            ]
        )
    return StepTableFit(
        source=source,
        kind=config.trainer.kind,
        time_factor=best[0],
        fixed_s=best[1],
        measured_s=measured,
        predicted_s=_predict(best, shares),
        left_out=left_out,
        own=own,
    )


def read_steps(source: Path, config: SimulationConfig) -> list[MeasuredStep]:
    """Rows of the table, with what they lack taken from the settings."""
    if not source.is_file():
        raise ValueError(f"{source} does not exist (looked in {Path.cwd()})")
    lines = read_table_text(source).splitlines()
    kept = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    cells = table_cells([line for _, line in kept], source)
    header = [plain(cell) for cell in cells[0]] if cells else []
    sized = "lengths" in header or {"tokens", "sequences"} <= set(header)
    if "seconds" not in header or not sized:
        raise ValueError(
            f"{source} needs the columns seconds, and tokens and sequences or lengths; it has "
            + (", ".join(cell.strip() for cell in cells[0])[:200] if cells else "none")
        )
    if len(cells) == 1:
        raise ValueError(f"{source} has a header but no rows; it needs one training step per row")
    return [
        _step(source, number, dict(zip(header, row, strict=False)), config)
        for (number, _), row in zip(kept[1:], cells[1:], strict=True)
    ]


def _step(
    source: Path, number: int, row: Mapping[str, str], config: SimulationConfig
) -> MeasuredStep:
    def value(name: str, default: float | None = None) -> float:
        text = row.get(name, "").strip()
        if not text and default is not None:
            return default
        try:
            found = float(text)
        except ValueError:
            found = float("nan")
        if not found > 0 or not np.isfinite(found):
            raise ValueError(f"{source}, line {number}: {name} is {text!r}, but must be > 0")
        return found

    if row.get("lengths", "").strip():
        try:
            lengths = [int(one) for one in row["lengths"].split()]
        except ValueError:
            lengths = []
        if not lengths or min(lengths) < 1:
            raise ValueError(
                f"{source}, line {number}: lengths must be whole numbers >= 1, separated by spaces"
            )
    else:
        sequences = int(value("sequences"))
        each, more = divmod(int(value("tokens")), max(1, sequences))
        if each < 1:
            raise ValueError(
                f"{source}, line {number}: tokens is {row.get('tokens')}, but must be >= sequences"
            )
        lengths = [each + (k < more) for k in range(sequences)]
    return MeasuredStep(
        row=number,
        seconds=value("seconds"),
        lengths=lengths,
        gpus=int(value("gpus", config.cluster.training_gpus)),
        micro_batch_tokens=int(value("microbatchtokens", config.trainer.micro_batch_tokens)),
        minibatches=int(value("minibatches", config.workload.minibatches)),
    )


def _shares(config: SimulationConfig, step: MeasuredStep) -> tuple[float, float]:
    """Seconds of a step that a factor of 1 on its passes gives, and those it does not change."""
    model, gpu = find_model(config.model), find_gpu(config.cluster.gpu)
    seconds = []
    for factor in (1.0, 2.0):
        layout = config.trainer.model_copy(
            update={
                "micro_batch_tokens": step.micro_batch_tokens,
                "time_factor": factor,
                "fixed_s": 0.0,
                "step_s": None,
            }
        )
        cost = training_cost(
            layout,
            model,
            gpu,
            step.gpus,
            longest_tokens=max(step.lengths),
            fewest_sequences=len(step.lengths) // step.minibatches,
        )
        seconds.append(cost.step(step.lengths, minibatches=step.minibatches).seconds)
    return seconds[1] - seconds[0], 2 * seconds[0] - seconds[1]


def _fit(shares: Values, measured: Values) -> tuple[float, float]:
    whole = shares.sum(axis=1)
    if len(measured) >= 2 and whole.max() >= _ALIKE * whole.min():
        start = (1.0, max(1e-3, 0.05 * float(measured.min())))
        found = fit_positive(lambda at: _predict((at[0], at[1]), shares), start, measured)
        return found.values[0], found.values[1]
    found = fit_positive(lambda at: _predict((at[0], 0.0), shares), (1.0,), measured)
    return found.values[0], 0.0


def _predict(values: tuple[float, float], shares: Values) -> Values:
    return np.asarray(values[0] * shares[:, 0] + shares[:, 1] + values[1])
