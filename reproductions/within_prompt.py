"""Correlation of response lengths within a prompt, measured on the model that Table 1 trains.

    ln(tokens) = prompt's mean + spread within the prompt        variance: between + within

    correlation = between / (between + within) = 1 - within / sigma^2

The spread within a prompt depends on the model, the spread between prompts on the set of prompts.
The first is measured; sigma, the spread of all responses, is that of the simulations. Competition
problems are more similar to each other than the prompts of a training run, so their own correlation
is lower. Two things differ from the training run: its temperature is 1 (here 0.6), its cap is
27,648 tokens (here 16,000, which one response in 288 reaches).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simulator.stats.statistics import Estimate, components

TABLE = Path(__file__).parent / "lengths_within_prompt.csv"
SIGMA = 0.684
"""Spread of ln(tokens) over all responses, in every preset (ServeGen, client 66)."""
_RESAMPLED = 2000


@dataclass(frozen=True, slots=True)
class Prompt:
    """Lengths of the responses to one prompt."""

    answers: int
    mean_ln_tokens: float
    sd_ln_tokens: float


def measured() -> list[Prompt]:
    """The measured table, whose first lines give its source."""
    with TABLE.open(encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [
            Prompt(int(row["answers"]), float(row["mean_ln_tokens"]), float(row["sd_ln_tokens"]))
            for row in rows
        ]


def variances(prompts: Sequence[Prompt]) -> tuple[float, float]:
    """Variances of ln(tokens) between and within prompts, by analysis of variance."""
    counts = np.array([prompt.answers for prompt in prompts], np.float64)
    means = np.array([prompt.mean_ln_tokens for prompt in prompts])
    spreads = np.array([prompt.sd_ln_tokens for prompt in prompts])
    found = components(counts, means, spreads)
    return float(found.between), float(found.within)


def correlation_in_all(prompts: Sequence[Prompt], sigma: float = SIGMA) -> float:
    """Correlation between two responses to one prompt, if all responses have spread `sigma`."""
    return max(0.0, 1 - variances(prompts)[1] / sigma**2)


def correlation_among(prompts: Sequence[Prompt]) -> float:
    """The same among these prompts alone."""
    between, within = variances(prompts)
    return between / (between + within)


def with_interval(prompts: Sequence[Prompt], sigma: float = SIGMA) -> Estimate:
    """`correlation_in_all` with its 95 % interval over prompts (bootstrap)."""
    generator = np.random.default_rng(1)
    chosen = generator.integers(0, len(prompts), (_RESAMPLED, len(prompts))).tolist()
    values = [correlation_in_all([prompts[one] for one in drawn], sigma) for drawn in chosen]
    low, high = np.quantile(values, [0.025, 0.975]).tolist()
    return Estimate(correlation_in_all(prompts, sigma), low, high)
