r"""Fit a distribution of response lengths: log-normal with a spike at the cap, or one length.

    numbers, CSV, trace, run --observed_lengths--> Observed --fit_observed--> LengthFit

The mean is that of the observed lengths, since the average work of a step depends on it alone.
The spread, sigma, maximizes the likelihood of all lengths. One that reached the cap says only that
it would have been at least as long (a censored observation):

$$ \ln L = \sum_{x < c} \ln \frac{\phi(z(x))}{\sigma} + n_{x = c} \ln (1 - \Phi(z(c))), \quad
z(x) = (\ln x - \mu) / \sigma $$
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from simulator.calibrate.length_fit import (
    Family,
    LengthFit,
    WithinPrompts,
    distance,
    lognormal,
)
from simulator.calibrate.length_source import Groups, LengthSource, Observed, observed_lengths
from simulator.config.schema import LengthConfig
from simulator.stats.components import components, correlation_interval, summaries
from simulator.workload.histogram import Histogram
from simulator.workload.lengths import ConstantLengths, Distribution

_SIGMAS: Final = np.geomspace(0.02, 3.0, 120)
"""Spreads of ln(tokens) to try, in steps of 4 %; then finer ones around the best."""
_FINER: Final = 41
_SPIKE: Final = 5.0
"""How many times more frequent than its neighbors the longest length must be to be a cap."""
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
    """How alike the responses to one prompt are; None if no prompt has several that differ.

    By analysis of variance of ln(tokens) (`simulator.stats.components`), whatever the size of the
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
    """Whether the longest length is so frequent that it must be a cap."""
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
