"""Fit the length model to the responses of a run: log-normal, with a spike at the cap.

tokens of each group --> mean after the cap, spread, correlation inside a group
                     --> distance of the distribution from the held-out responses
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.workload.lognormal import LogNormalLengths

_SIGMAS: Final = np.geomspace(0.02, 3.0, 120)
"""Spreads of ln(tokens) to try, in steps of 4 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFit:
    """Fitted distribution of the response lengths of a run."""

    kind: str
    """`lognormal`, or `constant` if all are equal."""
    mean_tokens: float
    sigma: float
    max_tokens: int
    group_correlation: float
    answers: int
    held_out_answers: int
    distance: float
    """Kolmogorov-Smirnov distance: largest difference between the cumulative distributions of the
    model and of the held-out responses; 0 to 1."""

    def settings(self) -> dict[str, str | float]:
        """The fit as settings, by dotted name."""
        given: dict[str, str | float] = {"kind": self.kind, "mean_tokens": self.mean_tokens}
        if self.kind == "lognormal":
            given |= {"sigma": self.sigma, "group_correlation": self.group_correlation}
        given["max_tokens"] = self.max_tokens
        return {f"workload.answers.{name}": value for name, value in given.items()}


def fit_lengths(
    fitted: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]], max_tokens: int | None
) -> LengthFit:
    """Fit to the groups of some training steps, and compare with those of others.

    Args:
        fitted: tokens of the responses of each group.
        held_out: the same, not used by the fit.
        max_tokens: cap of the responses; None uses the longest one.

    Raises:
        ValueError: one line: there are no responses.
    """
    tokens = _flat(fitted)
    if not len(tokens):
        raise ValueError("no group of the run has responses; there is nothing to fit lengths to")
    longest = int(max(tokens.max(), _flat(held_out).max(initial=0)))
    cap = max(longest, max_tokens or 0)
    mean = float(tokens.mean())
    counts = {"answers": len(tokens), "held_out_answers": len(_flat(held_out))}
    if tokens.min() == tokens.max() or not 1 < mean < cap:
        return LengthFit(
            kind="constant",
            mean_tokens=float(round(mean)),
            sigma=0.0,
            max_tokens=cap,
            group_correlation=0.0,
            distance=float((_flat(held_out) != round(mean)).mean()) if held_out else 0.0,
            **counts,
        )
    likelihoods = [_log_likelihood(tokens, _model(mean, sigma, cap), cap) for sigma in _SIGMAS]
    sigma = float(_SIGMAS[int(np.argmax(likelihoods))])
    return LengthFit(
        kind="lognormal",
        mean_tokens=mean,
        sigma=sigma,
        max_tokens=cap,
        group_correlation=group_correlation(fitted),
        distance=_distance(_flat(held_out), _model(mean, sigma, cap), cap) if held_out else 0.0,
        **counts,
    )


def group_correlation(groups: Sequence[Sequence[int]]) -> float:
    r"""Correlation of ln(tokens) between two responses to one prompt, 0 to 1; 0 if unknown.

    $$ r = \frac{B - W}{B + (k - 1) W} $$

    with the mean squares B between and W within groups of k responses (analysis of variance, Fisher
    1925). Only groups of the most frequent size count.
    """
    sizes = [len(group) for group in groups]
    size = max(set(sizes), key=sizes.count, default=0)
    logs = np.log([list(group) for group in groups if len(group) == size])
    if size < 2 or len(logs) < 2:
        return 0.0
    between = size * float(logs.mean(axis=1).var(ddof=1))
    within = float(logs.var(axis=1, ddof=1).mean())
    total = between + (size - 1) * within
    return min(1.0, max(0.0, (between - within) / total)) if total > 0 else 0.0


def groups_of_steps(
    tokens: Mapping[int, Sequence[int]], steps: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """The responses of the groups of some training steps."""
    return [tokens[group] for groups in steps for group in groups if group in tokens]


def _model(mean: float, sigma: float, cap: int) -> LogNormalLengths:
    return LogNormalLengths(wanted_mean_tokens=mean, sigma=float(sigma), max_tokens=cap)


def _log_likelihood(tokens: NDArray[np.float64], model: LogNormalLengths, cap: int) -> float:
    """Log-likelihood of the logs of lengths below the cap, and of the number that reach it."""
    scores = (np.log(tokens) - model.mu) / model.sigma
    below = tokens < cap
    inside = -0.5 * scores[below] ** 2 - math.log(model.sigma)
    reaching = max(model.capped_share(), 1e-300)
    return float(inside.sum()) + int((~below).sum()) * math.log(reaching)


def _distance(tokens: NDArray[np.float64], model: LogNormalLengths, cap: int) -> float:
    """Largest difference of the two distribution functions, at whole numbers of tokens."""
    if not len(tokens):
        return 0.0
    largest = 0.0
    for length in np.unique(tokens):
        share = float((tokens <= length).mean())
        # A whole length stands for the lengths that are rounded to it.
        score = (math.log(length + 0.5) - model.mu) / model.sigma
        modelled = 1.0 if length >= cap else math.erfc(-score / math.sqrt(2)) / 2
        largest = max(largest, abs(share - modelled))
    return largest


def _flat(groups: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    return np.array([tokens for group in groups for tokens in group], np.float64)
