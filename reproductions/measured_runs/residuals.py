"""The errors of the saved rows as data of the simulator, for the intervals of its predictions.

    results/measured_runs.json (saved) --records--> simulator/report/data/measured_errors.json

`python -m reproductions.measured_runs --save` writes both. Who predicts has no measured synchronous
step to fit its rest to, so the errors are those without this fit. Rows whose
step something else was fitted to have no error and are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reproductions.measured_runs.ablation import RESTS
from reproductions.measured_runs.families import Family, Measured, MeasuredRuns, load
from reproductions.report import results
from simulator.catalogue.gpu import find_gpu
from simulator.config.load import load_simulation
from simulator.report.measured_errors import FILE, kind_of

_DIGITS = 4
"""Of ln(predicted / measured): 0.01 % of the number."""


def save() -> Path:
    """Write the errors of the saved result; returns the file."""
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(to_text(saved_records()), encoding="utf-8")
    return FILE


def saved_records() -> list[dict[str, Any]]:
    """The errors of the rows of the saved result."""
    return records(results.load("measured_runs").data["rows"], load())


def records(saved: Sequence[Mapping[str, Any]], runs: MeasuredRuns) -> list[dict[str, Any]]:
    """A record of `simulator.report.measured_errors.MeasuredRow` for every predicted row.

    Args:
        saved: `data.rows` of a saved result.
        runs: the rows that it was made from.

    Raises:
        KeyError: a saved row that `runs` has not: simulate and save again.
    """
    families = {one.id: one for one in runs.families}
    return [
        _record(one, families[one["family"]], families[one["family"]].row(one["row"]))
        for one in saved
        if not one["without_rest"]["step_is_fitted"]
    ]


def to_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The file, with a line per row."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    made_by = "python -m reproductions.measured_runs --save"
    return f'{{\n "made_by": "{made_by}",\n "rows": [\n{lines}\n ]\n}}\n'


def _record(saved: Mapping[str, Any], family: Family, row: Measured) -> dict[str, Any]:
    config = load_simulation(None, {**family.settings, **row.settings})
    predicted = saved["without_rest"]
    gain = predicted["predicted_gain"]
    return {
        "row": row.id,
        "family": family.id,
        "group": family.group,
        "kind": kind_of(config)._asdict(),
        "gpu": find_gpu(config.cluster.gpu).name,
        "fitted": [
            fit.setting
            for fit in family.fits
            if fit.mode in ("", row.mode) and fit.setting not in RESTS
        ],
        "step": _log(predicted["predicted_s"] / saved["measured_s"]),
        "gain": None if gain is None else _log(gain / saved["measured_gain"]),
    }


def _log(quotient: float) -> float:
    return round(math.log(quotient), _DIGITS)
