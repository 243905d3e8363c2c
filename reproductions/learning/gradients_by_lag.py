"""Gradients of old samples against the on-policy gradient, by lag and loss: bias and variance."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

import torch

from benchmarks.harness import Arguments
from reproductions.learning.gradients.bias_and_variance import FIRST, LAST, Point, Size, points
from reproductions.learning.gradients.findings import LAG, differences, findings, shown
from reproductions.learning.gradients.picture import LOOKS, draw
from reproductions.learning.gradients.pooled import Points, cosine, mean_of, minibatch_cosine
from reproductions.report.harness import main
from reproductions.report.records import Reproduction, Row
from reproductions.report.results import load

RATES: Final = (3e-4, 1e-4)
SIZE: Final = Size(version=32, lags=(0, 1, 2, 4, 8, 16), blocks=12)
QUICK: Final = Size(version=9, lags=(0, 8), blocks=2)
WHY: Final = (
    f"The model (Adder-102K, 3-digit sums, config `cosim`) learns synchronously for {SIZE.version} "
    f"steps of four minibatches. Its weights of {SIZE.lags[0]} to {SIZE.lags[-1]} steps before "
    "then sample the same prompts with the same random numbers, in groups of 8 with normalized "
    f"advantages, as a trainer gets them: {SIZE.blocks} minibatches of 128 samples for each lag. "
    "So the drift is that of a synchronous run; an asynchronous one drifts in other directions, "
    "those of its own old gradients.",
    "The on-policy gradient is of samples of the very weights that it is taken at, of the same "
    "prompts, four times as many. Squared norms are free of sampling noise: the variance between "
    "minibatches over their number is subtracted, so that a squared bias may be negative and a "
    "cosine above 1; intervals are over seeds of the whole procedure (cosines: jackknife).",
    "Before the last minibatch, the weights have moved by three minibatches of an on-policy batch, "
    "and the proximal policy is that before the first. There a clip is to have an effect.",
    "An advantage is relative to its group, which an older policy sampled: importance sampling by "
    "token does not correct that, nor which prefixes are reached.",
)


def reproduce(arguments: Arguments) -> Reproduction:
    """Train and measure; `--quick` two lags of one learning rate, from fewer samples."""
    return build(measure(arguments))


def recorded(_: Arguments) -> Reproduction:
    """The packaged result."""
    saved = load("gradients_by_lag")
    return replace(build(saved.data), origin=saved.origin)


def measure(arguments: Arguments) -> dict[str, Any]:
    """The numbers of all cells, as JSON; sets the number of torch's threads to one."""
    torch.set_num_threads(1)
    rates, size = (RATES[:1], QUICK) if arguments.quick else (RATES, SIZE)
    found: list[Point] = []
    for seed, lr in product(range(1, arguments.repeats + 1), rates):
        print(f"learning rate {lr:g}, seed {seed}", file=sys.stderr, flush=True)
        found += points(lr, seed, size)
    return {"points": Points(found).to_columns()}


def build(data: Mapping[str, Any]) -> Reproduction:
    """What is said and shown of the numbers of `measure`."""
    study = Points.from_columns(data["points"])
    rate = study.rates[0]
    return Reproduction(
        name="gradients_by_lag",
        claim=(
            "Bias and variance of the policy gradient of old samples, by lag and loss, against the "
            "on-policy gradient. Not in the paper."
        ),
        rows=_rows(study),
        parameters=(),
        why=WHY,
        findings=findings(study),
        tables={
            f"Lag {LAG}, by loss; bias and norms in units of the squared on-policy gradient": [
                {
                    "learning rate": f"{lr:g}",
                    "before the": place,
                    "loss": loss,
                    **_line(study.of(lr, place, LAG, loss)),
                }
                for lr, place, loss in product(study.rates, (FIRST, LAST), LOOKS)
            ]
        },
        figure=lambda: draw(study, rate),
        title=f"Gradients of old samples against the on-policy gradient, learning rate {rate:g}",
        data=data,
    )


def _rows(study: Points) -> list[Row]:
    """The two objectives of the paper, compared over all lags."""
    return [
        Row(name=f"{name}, naive minus decoupled", paper=None, ours=gap, unit="")
        for name, gap in differences(study)
    ]


def _line(own: Sequence[Point]) -> dict[str, str]:
    return {
        "squared bias": shown(mean_of(own, lambda one: one.squared_bias)),
        "cosine": shown(cosine(own)),
        "removed by the clip": shown(mean_of(own, lambda one: one.squared_cut)),
        "variance": shown(mean_of(own, lambda one: one.variance)),
        "minibatch cosine": shown(minibatch_cosine(own)),
        "tokens clipped": f"{mean_of(own, lambda one: one.clipped).mean:.1%}",
        "drift": f"{mean_of(own, lambda one: one.drift).mean:.3f}",
        "largest ratio": f"{max(one.largest_ratio for one in own):.1f}",
    }


if __name__ == "__main__":
    main(reproduce, __doc__)
