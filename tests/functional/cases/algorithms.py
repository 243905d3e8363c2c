"""Rows of the table: the named losses."""

from __future__ import annotations

import inspect
from functools import partial

import torch
from torch import Tensor

from areal_lab.functional.losses.clipped import (
    clip_cov,
    dapo,
    dr_grpo,
    dual_clip_ppo,
    grpo,
    kl_cov,
)
from areal_lab.functional.losses.corrected import (
    a3po,
    geometric_mis,
    icepop,
    kpop,
    m2po,
    sequence_mis,
    sequence_tis,
    token_tis,
    trm,
)
from areal_lab.functional.losses.divergence import dppo_kl, dppo_tv, dro, kimi, prime_rl
from areal_lab.functional.losses.reinforce import (
    aipo,
    cispo,
    importance_sampling,
    positive_nll,
    reinforce,
    topr,
    truncated_reinforce,
)
from areal_lab.functional.losses.sequence import gmpo, gspo, gspo_token, luspo, sapo, vespo
from areal_lab.functional.losses.stale import mu_grpo, r2vpo, sat
from tests.functional.case import Case, Ragged
from tests.functional.cases.losses import tokens

STOPPED = dict.fromkeys(
    ("grad", "double backward"),
    "a stop-gradient by design: finite differences differ from the gradient",
)


def with_sequences(loss, sequences):
    """The loss with the keyword bound where it has it."""
    function = loss.func if isinstance(loss, partial) else loss
    has = "sequences" in inspect.signature(function).parameters
    return partial(loss, sequences=sequences) if has else loss


def both_layouts(loss, *extra):
    """Loss and per-token diagnostics of the padded and of the packed batch."""

    def layouts(batch: Ragged):
        padded = [-batch.draw(seed, scale=0.3).abs() for seed in range(3)]
        padded += [batch.draw(3), batch.mask, *(make(batch) for make in extra)]
        ours = with_sequences(loss, batch.rows)(*padded)
        packed = with_sequences(loss, batch.sequences)(*map(batch.pack, padded))
        if isinstance(ours, Tensor):
            return ours, packed
        return [batch.pack(x) if x.dim() else x for x in ours], list(packed)

    return layouts


def case(name, loss, *, reasons=None):
    return Case(
        name=name,
        function=loss,
        sample=tokens,
        differentiable=(0,),
        layouts=both_layouts(loss),
        reasons=reasons or {},
    )


def clip_cov_of_noise(*inputs, **sequences):
    *batch, noise = inputs
    return clip_cov(*batch, noise=noise, fraction=0.3, band=(-9.0, 9.0), **sequences)


def a3po_of_versions(*inputs):
    *batch, versions = inputs
    return a3po(*batch, versions=versions, trainer_version=5)


def noisy_tokens(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return *tokens(seed), torch.rand(6, generator=generator, dtype=torch.double)


def dated_tokens(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return *tokens(seed), torch.randint(-1, 5, (6,), generator=generator)


def versions_of(batch: Ragged) -> Tensor:
    return torch.arange(batch.mask.numel()).reshape(batch.mask.shape) % 7 - 1


CASES = [
    case(name, loss)
    for name, loss in [
        ("grpo", grpo),
        ("dr_grpo", partial(dr_grpo, max_tokens=8)),
        ("dapo", dapo),
        ("dual_clip_ppo", dual_clip_ppo),
        ("kl_cov", partial(kl_cov, fraction=0.3)),
        ("token_tis", partial(token_tis, cap=1.1)),
        ("sequence_tis", partial(sequence_tis, cap=1.1)),
        ("icepop", partial(icepop, low=0.9)),
        ("sequence_mis", sequence_mis),
        ("geometric_mis", partial(geometric_mis, low=0.7, high=1.5)),
        ("kpop", partial(kpop, delta=0.05)),
        ("trm", partial(trm, delta=0.2)),
        ("mu_grpo", partial(mu_grpo, threshold=1.1)),
        ("r2vpo", partial(r2vpo, variance=0.04, rate=0.1, penalty=0.5)),
        ("m2po", m2po),
        ("reinforce", reinforce),
        ("importance_sampling", importance_sampling),
        ("dppo_tv", dppo_tv),
        ("dppo_kl", dppo_kl),
        ("prime_rl", prime_rl),
        ("kimi", kimi),
        ("dro", partial(dro, beta=0.1)),
        ("gspo", partial(gspo, clip_epsilon=0.5)),
        ("luspo", partial(luspo, clip_epsilon=0.5)),
        ("gmpo", gmpo),
        ("sapo", sapo),
    ]
]
CASES += [
    case(name, loss, reasons=STOPPED)
    for name, loss in [
        # Its bound is a function of log r without a gradient.
        ("sat", partial(sat, clip_epsilon=(0.5, 0.5), quantile=0.5)),
        ("cispo", cispo),
        ("truncated_reinforce", truncated_reinforce),
        ("aipo", aipo),
        ("topr", topr),
        ("gspo_token", partial(gspo_token, clip_epsilon=0.5)),
        ("vespo", vespo),
    ]
]
CASES += [
    Case(
        name="clip_cov",
        function=clip_cov_of_noise,
        sample=noisy_tokens,
        differentiable=(0,),
        layouts=both_layouts(clip_cov_of_noise, lambda batch: batch.draw(4)),
    ),
    Case(
        name="a3po",
        function=a3po_of_versions,
        sample=dated_tokens,
        differentiable=(0,),
        layouts=both_layouts(a3po_of_versions, versions_of),
        reasons=STOPPED,
    ),
    Case(
        name="positive_nll",
        function=positive_nll,
        sample=lambda seed: (tokens(seed)[0], tokens(seed)[3], tokens(seed)[4]),
        differentiable=(0,),
        layouts=lambda batch: (
            positive_nll(batch.draw(0), batch.draw(1), batch.mask),
            positive_nll(*map(batch.pack, (batch.draw(0), batch.draw(1), batch.mask))),
        ),
    ),
]
