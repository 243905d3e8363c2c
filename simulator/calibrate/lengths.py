r"""Fit a distribution of response lengths (log-normal with a spike at the cap), and its curves.

    numbers, CSV, trace, run --observed_lengths--> Observed --fit_observed--> LengthFit

The mean is that of the observed lengths, since the average work of a step depends on it alone.
The spread, sigma, maximizes the likelihood of all lengths. One that reached the cap says only that
it would have been at least as long (a censored observation):

$$ \ln L = \sum_{x < c} \ln \frac{\phi(z(x))}{\sigma} + n_{x = c} \ln (1 - \Phi(z(c))), \quad
z(x) = (\ln x - \mu) / \sigma $$

Curves of response lengths for pictures, and what the longest response of a batch costs.

    quantile_curves   tokens against the share of responses, for a probability plot
    batch_curve       responses that still run against the tokens that each has generated
    batch_tail        the same as numbers, averaged over random batches

A batch is one synchronous step: all responses start together and get a token per decode step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypedDict

import numpy as np
from numpy.typing import NDArray

from simulator.calibrate.length_fit import Family, LengthFit, WithinPrompts, distance, lognormal
from simulator.calibrate.length_source import Groups, LengthSource, Observed, observed_lengths
from simulator.config.schema import LengthConfig
from simulator.stats.statistics import (
    Estimate,
    components,
    correlation_interval,
    estimate,
    summaries,
)
from simulator.workload.histogram import Histogram, normal_quantiles
from simulator.workload.lengths import ConstantLengths, Distribution, Lengths

_SIGMAS: Final = np.geomspace(0.02, 3.0, 120)
"""Spreads of ln(tokens) to try, in steps of 4 %; then finer ones around the best."""
_FINER: Final = 41
_SPIKE: Final = 5.0
"""Times more frequent than its neighbors the longest length must be to be a cap."""
_NEIGHBORS: Final = 0.9
"""Neighbors are the lengths from this share of the longest one on."""
_MOSTLY_CUT: Final = 0.3
"""Share of lengths at the cap above which sigma is a guess."""


def fit_lengths(
    source: LengthSource,
    *,
    max_tokens: int | None = None,
    column: str = "",
    prompt_column: str = "",
    name: str = "the table",
) -> LengthFit:
    """Fit the distribution of response lengths, from whatever has them.

        fit = fit_lengths("lengths.csv")    a CSV file, a run folder, a trace's name, or numbers
        fit.quantiles([0.5, 0.99])          tokens
        print(fit.to_yaml())                a block for `areal-lab simulate`

    Args:
        source: numbers (lists of lists are responses by prompt), a CSV file or its text, a run
            folder or its events.jsonl, or the name of a shipped trace.
        max_tokens: the cap with which they were generated. None takes that of the run; otherwise
            the longest length, and a note says whether it looks like a cap.
        column: column of a table with the lengths; empty finds it by its name.
        prompt_column: column of a table that names the prompt of each response.
        name: of a table that is given as text or bytes, for messages and exports.

    Raises:
        ValueError: one line: there are no lengths, or the first value that is none, with its line;
            or a cap below the longest length.
    """
    observed = observed_lengths(source, column=column, prompt_column=prompt_column, name=name)
    longest = math.ceil(observed.histogram.longest)
    if max_tokens is not None and max_tokens < longest:
        raise ValueError(
            f"max_tokens is {max_tokens}, but a response has {longest:,} tokens; it is the cap "
            "with which the lengths were generated (a lower one can be chosen when they are "
            "exported)"
        )
    return fit_observed(observed if max_tokens is None else replace(observed, cap=max_tokens))


def fit_observed(observed: Observed) -> LengthFit:
    """Fit to lengths that were read; see `fit_lengths`."""
    histogram = observed.histogram
    held_out = [float(one) for group in observed.held_out for one in group]
    cap = math.ceil(max([histogram.longest, observed.cap or 1, *held_out]))
    known = observed.cap is not None or _has_spike(histogram)
    # Without a cap, every length is a whole one, the longest, too.
    reached = histogram.share_at_least(cap) if known else 0.0
    within = within_prompts(observed.groups)
    compared = Histogram.of_lengths(held_out) if held_out else histogram
    kind: Family
    model: Distribution
    mean, sigma = histogram.mean, 0.0
    if len(histogram.weight) == 1 or not 1 < mean < cap:
        kind, mean = "constant", float(round(mean))
        model = ConstantLengths(tokens=mean, max_tokens=cap)
    else:
        kind, sigma = "lognormal", _most_likely_sigma(histogram, mean, cap, reached)
        model = lognormal(mean, sigma, cap)
    return LengthFit(
        kind=kind,
        mean_tokens=mean,
        sigma=sigma,
        max_tokens=cap,
        capped_share=reached,
        within_prompts=within,
        answers=max(1, round(float(histogram.weight.sum()))),
        held_out_answers=len(held_out),
        distance=distance(compared, model),
        notes=(*observed.notes, *_notes(observed, cap, reached, within)),
        observed=observed,
    )


def within_prompts(groups: Groups) -> WithinPrompts | None:
    """Similarity of the responses to one prompt; None if no prompt has several that differ.

    By analysis of variance of ln(tokens) (`simulator.stats.statistics`), whatever the size of the
    groups. A cap lowers the correlation: lengths at the cap count as they are.
    """
    logs = [np.log(np.asarray(group, np.float64)).tolist() for group in groups if len(group)]
    if len(logs) < 2 or all(len(one) < 2 for one in logs):
        return None
    counts, means, spreads = summaries(logs)
    found = components(counts, means, spreads)
    if found.between + found.within == 0:  # all lengths are equal
        return None
    return WithinPrompts(
        float(found.correlation),
        correlation_interval(counts, means, spreads),
        math.sqrt(found.within),
    )


def _has_spike(histogram: Histogram) -> bool:
    """Return whether the longest length is so frequent that it must be a cap."""
    longest = histogram.longest
    at_end = histogram.to_tokens == longest
    count = float(histogram.weight[at_end].sum())
    below = (histogram.to_tokens >= _NEIGHBORS * longest) & ~at_end
    tokens = max(1.0, (1 - _NEIGHBORS) * longest)
    # A whole number of tokens as frequent as those around it.
    expected = float(histogram.weight[below].sum()) / tokens
    return len(histogram.weight) > 1 and count >= 2 and count > _SPIKE * expected


def _most_likely_sigma(histogram: Histogram, mean: float, cap: int, reached: float) -> float:
    tokens, weight = histogram.mean_tokens, histogram.weight / histogram.weight.sum()
    whole = tokens < cap if reached > 0 else tokens <= cap
    logs, weight = np.log(tokens[whole]), weight[whole]

    def log_likelihood(sigma: float) -> float:
        model = lognormal(mean, sigma, cap)
        scores = (logs - model.mu) / sigma
        inside = float((-0.5 * scores**2 - math.log(sigma)) @ weight)
        return inside + reached * math.log(max(model.capped_share(), 1e-300))

    best = max(_SIGMAS.tolist(), key=log_likelihood)
    step = float(_SIGMAS[1] / _SIGMAS[0])
    finer: list[float] = np.geomspace(best / step, best * step, _FINER).tolist()
    return max(finer, key=log_likelihood)


def _notes(observed: Observed, cap: int, reached: float, within: WithinPrompts | None) -> list[str]:
    notes = []
    if observed.cap is None:
        seen = (
            f"The longest length, {cap:,} tokens, is far more frequent than those just below: it "
            "is taken for the cap."
            if reached > 0
            else f"No cap was given and none is visible: the longest length, {cap:,} tokens, is "
            "where the fitted distribution ends."
        )
        notes.append(seen)
    if reached > 0:
        notes.append(
            f"{reached:.2%} of the lengths were cut off at {cap:,} tokens; the fit takes them as "
            "at least that long."
        )
    if reached > _MOSTLY_CUT:
        notes.append(
            "So many were cut off that the spread follows from the log-normal form more than from "
            "lengths that were seen."
        )
    if within is None:
        notes.append(
            "Which responses answer the same prompt is not known: a simulation takes the default "
            f"correlation within a prompt, {LengthConfig().group_correlation:g}."
        )
    return notes


_LEAST_SHARE: Final = 1e-4
"""Most extreme share of a curve."""


class QuantilePoint(TypedDict):
    """A point of a probability plot."""

    family: Family
    share: float
    """Share of the responses up to this length."""
    score: float
    """The share as a quantile of the normal distribution: a log-normal is a straight line."""
    tokens: float


class BatchPoint(TypedDict):
    """A moment of a batch."""

    tokens: float
    """Decode steps since its start."""
    running: float
    """Share of its responses that have not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTail:
    """Effect of the longest response on a batch; means over random batches."""

    mean_tokens: Estimate
    """Mean length of a response of the batch."""
    longest_tokens: Estimate
    """Decode steps until the last response ends."""
    done_at_half: Estimate
    """Share of the responses that have ended when half of these steps are done."""
    waiting: Estimate
    """Share of the places of ended responses in the decode steps: 1 - mean / longest."""


def quantile_curves(
    fit: LengthFit, families: Sequence[Family] | None = None, *, points: int = 121
) -> list[QuantilePoint]:
    """Quantiles of the observed lengths (`trace`) and of what is fitted to them.

    The shares are evenly spaced in normal scores, from one response of all to all but one.
    """
    least = min(0.25, max(_LEAST_SHARE, 0.5 / fit.answers))
    edge = float(normal_quantiles(np.array([1 - least]))[0])
    scores = np.linspace(-edge, edge, points)
    shares = np.array([math.erfc(-score / math.sqrt(2)) / 2 for score in scores.tolist()])
    return [
        {"family": family, "share": share, "score": score, "tokens": tokens}
        for family in families or fit.families
        for share, score, tokens in zip(
            shares.tolist(), scores.tolist(), fit.quantiles(shares, family).tolist(), strict=True
        )
    ]


def batch_curve(
    lengths: Lengths, groups: int, samples: int, *, seed: int = 1, points: int = 200
) -> list[BatchPoint]:
    """Responses of one random batch that still run, over its decode steps."""
    tokens = np.sort(_batch(lengths, groups, samples, np.random.default_rng(seed)).ravel())
    places = np.linspace(0, tokens[-1], points)
    running = 1 - np.searchsorted(tokens, places, side="right") / len(tokens)
    return [
        {"tokens": place, "running": share}
        for place, share in zip(places.tolist(), running.tolist(), strict=True)
    ]


def batch_tail(
    lengths: Lengths, groups: int, samples: int, *, batches: int = 40, seed: int = 1
) -> BatchTail:
    """Averages over random batches, with 95 % intervals."""
    generator = np.random.default_rng(seed)
    drawn = [_batch(lengths, groups, samples, generator) for _ in range(batches)]
    means = [float(one.mean()) for one in drawn]
    longest = [float(one.max()) for one in drawn]
    return BatchTail(
        mean_tokens=estimate(means),
        longest_tokens=estimate(longest),
        done_at_half=estimate([float((one <= one.max() / 2).mean()) for one in drawn]),
        waiting=estimate([1 - mean / most for mean, most in zip(means, longest, strict=True)]),
    )


def _batch(
    lengths: Lengths, groups: int, samples: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    if groups < 1 or samples < 1:
        raise ValueError(
            f"a batch of {groups} prompts x {samples} responses is empty; both must be at least 1"
        )
    return lengths.draw(generator, groups, samples)
