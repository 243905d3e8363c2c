"""The same rows with lengths that have a body and a spike at the cap, which a log-normal has not.

Suppose that most responses are short and a few reach the cap. Then generation takes the time of the
longest ones, and a log-normal whose mean is fitted to that time has several times the tokens, which
the trainer pays for. Body and spike are assumed, not fitted; the trainer's speed is fitted to the
synchronous update as before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from tempfile import TemporaryDirectory
from typing import Any

from reproductions.measured_runs.families import Family, MeasuredRuns
from reproductions.measured_runs.predict import Predicted, Sizes, predict
from reproductions.measured_runs.score import ratios

QUANTILES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Spiked:
    """A log-normal body, and a share of responses at the cap."""

    body_tokens: float
    """Mean of the body."""
    sigma: float
    """Spread of ln(tokens) of the body."""
    capped_share: float

    def table(self, cap_tokens: int) -> list[tuple[int, float]]:
        """Lengths with their weights, quantiles of the body and then the cap."""
        normal = NormalDist(math.log(self.body_tokens) - self.sigma**2 / 2, self.sigma)
        scores = [normal.inv_cdf((place + 0.5) / QUANTILES) for place in range(QUANTILES)]
        weight = (1 - self.capped_share) / QUANTILES
        body = [(max(1, min(cap_tokens, round(math.exp(score)))), weight) for score in scores]
        return [*body, (cap_tokens, self.capped_share)]

    @property
    def name(self) -> str:
        """In a table."""
        return (
            f"{self.body_tokens:g} tokens on average, sigma {self.sigma:g}, and "
            f"{self.capped_share:.1%} at the cap"
        )


SPIKED = {
    "V3": Spiked(body_tokens=900, sigma=0.8, capped_share=0.003),
    "V8": Spiked(body_tokens=900, sigma=0.8, capped_share=0.01),
}
"""By family; assumed. The utilizations that follow are possible, those of fitted log-normals (84
to 100 % of the peak, without recomputation) are not."""


def with_spikes(runs: MeasuredRuns, sizes: Sizes) -> list[dict[str, Any]]:
    """Every row of the families above, with these lengths instead."""
    return [
        record
        for family in runs.families
        if family.id in SPIKED
        for record in _records(family, SPIKED[family.id], runs, sizes)
    ]


def _records(
    family: Family, lengths: Spiked, runs: MeasuredRuns, sizes: Sizes
) -> list[dict[str, Any]]:
    cap_tokens = family.settings["workload.answers.max_tokens"]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.csv"
        lines = [f"{tokens},{weight:.9f}" for tokens, weight in lengths.table(cap_tokens)]
        path.write_text("\n".join(["tokens,weight", *lines]) + "\n", encoding="utf-8")
        settings = {
            **family.settings,
            "workload.answers.kind": "trace",
            "workload.answers.trace": str(path),
            "workload.answers.mean_tokens": 0,
        }
        fits = [fit for fit in family.fits if fit.part == "update"]
        predicted = predict(replace(family, settings=settings, fits=fits), runs, sizes)
    return [_record(one, predicted, lengths, runs) for one in predicted]


def _record(
    one: Predicted, all_rows: Sequence[Predicted], lengths: Spiked, runs: MeasuredRuns
) -> dict[str, Any]:
    step_s, measured_s = one.run.step_s.mean, runs.step_s(one.family, one.row)
    gains = ratios(all_rows[0], one, lambda result: result.step_s)
    gain, measured = math.fsum(gains) / len(gains), runs.gain(one.family, one.row)
    return {
        "row": one.row.id,
        "lengths instead": lengths.name,
        "step, s": f"{step_s:.0f}",
        "error": f"{step_s / measured_s - 1:+.0%}",
        "gain": f"{gain:.2f}",
        "ln error": f"{math.log(gain / measured):+.2f}",
    }
