"""What models say of a batch before it is trained on: values, and the reference's log-probs.

    trajectories --pack--> critic    -> values [T], bootstrap values [N]
                           reference -> log-probs [T]

Every rank scores its groups, and all get all scores: advantages are taken over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from areal_lab.control.events import Version
from areal_lab.data.batch import PackedBatch, SampleTokens, sample_tokens
from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.models.copies import to_device
from areal_lab.training.device import on_device
from areal_lab.training.learner import Learner
from areal_lab.training.minibatch import Minibatch, make_minibatch
from areal_lab.training.timeline import Timeline


class BatchScores(NamedTuple):
    """Scores of all tokens that the policy chose, sample after sample, on the host.

    0 for samples that are not trained on.
    """

    values: Float[Tensor, " T"] | None = None
    """Before each token; None without a critic."""
    bootstrap_values: Float[Tensor, " N"] | None = None
    """Beyond the last token of responses that were cut off, 0 for others."""
    reference_logprobs: Float[Tensor, " T"] | None = None
    """None unless the distance from the reference is part of the reward."""


def score_batch(
    learner: Learner,
    trajectories: Sequence[Trajectory],
    members: list[int],
    version: Version,
    timeline: Timeline,
) -> BatchScores:
    """Score the members of a batch, without gradient.

    Args:
        learner: with a critic, a penalty on the reward, or neither.
        trajectories: of the whole batch.
        members: indices of those that are trained on.
        version: of the parameters.
        timeline: gets a span for each model.
    """
    critic = learner.critic
    reference = None if learner.kl_reward is None else learner.reference
    if critic is None and reference is None:
        return BatchScores()
    bootstraps = critic is not None and critic.bootstraps
    read = [_with_one_more(t) if bootstraps and t.truncated else t for t in trajectories]
    minibatch = make_minibatch(
        read,
        members,
        version=version,
        has_gradient=lambda _: True,
        cost=learner.cost,
        max_tokens=learner.settings.actor.max_tokens_per_mb,
        ranks=learner.ranks,
    )
    tokens, places = sample_tokens(trajectories), sample_tokens(read)
    own = places.first[tokens.ids()] + torch.cat([torch.arange(n) for n in tokens.lengths])
    scores = BatchScores()
    if critic is not None:
        with timeline.span("values"):
            values = _scored(learner, minibatch, places, critic.values)
        cut = places.lengths > tokens.lengths
        # One place beyond those of the sample; of others, any place.
        beyond = values[(places.first + places.lengths - 1)]
        scores = BatchScores(values[own], torch.where(cut, beyond, 0.0))
    if reference is not None:
        with timeline.span("reference log-probs"):
            logprobs = _scored(learner, minibatch, places, reference.logprobs)
        scores = scores._replace(reference_logprobs=logprobs[own])
    return scores


def _scored(
    learner: Learner,
    minibatch: Minibatch,
    places: SampleTokens,
    model: Callable[[PackedBatch], Tensor],
) -> Float[Tensor, " T"]:
    """What a model says of every token, of all ranks, on the host."""
    device = learner.device
    scored = torch.zeros(int(places.lengths.sum()), device=device)
    with torch.no_grad():
        for packed in minibatch.parts:
            rows = to_device(places.rows(packed), device)
            scored[rows] = model(on_device(packed, device)).float()
        for packed in minibatch.idle:
            model(on_device(packed, device))
    return learner.ranks.total(scored).cpu()


def _with_one_more(trajectory: Trajectory) -> Trajectory:
    """With a token that stands for the next one: the value before it is that beyond the end."""
    last = trajectory.segments[-1]
    next_token = Segment((trajectory.prompt_tokens[0],), (0.0,), last.version)
    return replace(trajectory, parts=(*trajectory.parts, next_token), turn_returns=())
