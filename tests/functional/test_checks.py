"""Plug-ins of the wrong kind, and segments that are none: one sentence with the fix."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from areal_lab.functional import (
    Segments,
    chain,
    decoupled_ppo,
    discounted_returns,
    entropy_bonus,
    group_advantages,
    huber_error,
    keep,
    kl_loss,
    length_weighted_mean,
    linear_recurrence,
    logistic_objective,
    logprobs_and_entropy,
    logprobs_and_entropy_from_logits,
    mask_outside,
    mask_second_moment,
    on_policy_distillation_loss,
    over_segments,
    policy_loss,
    preference_loss,
    reject,
    segment_reduce,
    self_normalize,
    sequence_mean,
    spread_to_tokens,
    straight_through,
    top_p,
    truncate,
    unmasked_runs,
    value_loss,
)

TOKENS = torch.tensor([[-1.0, -0.5, -0.3], [-0.2, -0.1, -0.7]])
MASK = torch.ones(2, 3, dtype=torch.bool)
IDS = torch.arange(2)[:, None].expand(2, 3)
BATCH = (TOKENS, TOKENS, TOKENS, TOKENS, MASK)

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def clipped(policy, advantages):
    return policy.log_ratio * advantages


WRONG = {
    "correct: a number": (partial(decoupled_ppo, correct=2.0), r"correct is 2\.0, but must be a f"),
    "correct: truncate": (partial(decoupled_ppo, correct=truncate), r"cap is a BehaviorWeight.*pa"),
    "correct: M2PO": (
        partial(decoupled_ppo, correct=mask_second_moment),
        r"threshold is a BehaviorWeight.*mask_second_moment\(0\.04\)",
    ),
    "correct: keep": (partial(decoupled_ppo, correct=keep), r"kept is a BehaviorWeight.*keep\(mas"),
    **{
        f"correct: {factory.__name__}": (
            partial(decoupled_ppo, correct=factory),
            rf"correct is <function {factory.__name__}.*takes other arguments; pass truncate\(2",
        )
        for factory in (mask_outside, self_normalize, over_segments, reject)
    },
    "correct: chain": (
        partial(decoupled_ppo, correct=chain),
        "correct returned a function, but mu",
    ),
    "surrogate: a name": (partial(policy_loss, surrogate="clip"), "surrogate is 'clip'.*clip_surr"),
    "surrogate: a tensor": (partial(policy_loss, surrogate=clipped), "returned a Tensor.*a Surrog"),
    "ratio": (
        partial(policy_loss, surrogate=clipped, ratio=lambda *_: TOKENS),
        "ratio returned a Tensor, but must return a AnchoredPolicy",
    ),
    "sequences: a tensor": (
        partial(decoupled_ppo, sequences=IDS),
        r"sequences is a Tensor, but must be Segments; pass Segments\(ids, count\)",
    ),
}


@pytest.mark.parametrize(("loss", "message"), WRONG.values(), ids=WRONG)
def test_parts_of_a_loss_of_the_wrong_kind_are_refused(loss, message):
    with pytest.raises(TypeError, match=message):
        loss(*BATCH)


ELSEWHERE = {
    "estimator: a name": (
        lambda: kl_loss(TOKENS, TOKENS, MASK, coefficient=0.1, estimator="k3"),
        "estimator is 'k3', but must be a function; pass k3",
    ),
    "estimator: a factory": (
        lambda: kl_loss(TOKENS, TOKENS, MASK, coefficient=0.1, estimator=straight_through),
        "estimator returned a function, but must return a Tensor",
    ),
    "aggregate of KL": (
        lambda: kl_loss(TOKENS, TOKENS, MASK, coefficient=0.1, aggregate="mean"),
        "aggregate is 'mean'",
    ),
    "aggregate of entropy": (
        lambda: entropy_bonus(TOKENS, MASK, coefficient=0.1, aggregate=torch.mean),
        "aggregate is <built-in.*takes other arguments; pass token_mean",
    ),
    "aggregate of distillation": (
        lambda: on_policy_distillation_loss(TOKENS, TOKENS, TOKENS, MASK, aggregate=None),
        "aggregate is None",
    ),
    "error: a factory": (
        lambda: value_loss(TOKENS, TOKENS, MASK, clip_epsilon=9.0, error=huber_error),
        r"delta is a Tensor, but must be a number; pass huber_error\(1\.0\)",
    ),
    "objective": (
        lambda: preference_loss(*[TOKENS[0]] * 4, objective=logistic_objective),
        "objective is <function logistic_objective.*takes other arguments.*beta=0.1",
    ),
    "baseline: a factory": (
        lambda: group_advantages(TOKENS[0], IDS[0], baseline=length_weighted_mean),
        "baseline returned a function",
    ),
    "scale": (lambda: group_advantages(TOKENS[0], IDS[0], scale=2.0), r"scale is 2\.0"),
    "keep: a factory": (
        lambda: logprobs_and_entropy_from_logits(TOKENS, IDS[:, 0], keep=top_p),
        r"p is a Tensor, but must be a number; pass top_p\(0\.95\)",
    ),
    "keep: a name": (
        lambda: logprobs_and_entropy(TOKENS, TOKENS, IDS[:, 0], keep="top_p"),
        "keep is 'top_p'",
    ),
    "sequences of an aggregate": (lambda: sequence_mean(TOKENS, MASK, IDS), "sequences is a Tens"),
    "sequences of a return": (
        lambda: discounted_returns(TOKENS, MASK, sequences=IDS),
        "sequences is a Tensor",
    ),
    "segments of a correction": (
        lambda: decoupled_ppo(*BATCH, correct=over_segments(IDS, truncate(2.0))),
        "segments is a Tensor",
    ),
    "runs": (lambda: unmasked_runs(MASK, IDS), "sequences is a Tensor"),
}


@pytest.mark.parametrize(("call", "message"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_plug_ins_of_the_wrong_kind_are_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_an_error_inside_of_a_plug_in_is_its_own():
    def broken(weight):
        return weight + "nothing"

    with pytest.raises(TypeError, match="can only concatenate tuple"):
        decoupled_ppo(*BATCH, correct=broken)


@pytest.mark.parametrize("bad", [-1, 2])
def test_ids_out_of_range_are_refused(bad):
    ids = IDS.clone()
    ids[1, 1] = bad
    sequences = Segments(ids, 2)
    message = rf"ids has an entry {bad}, but must be in 0 \.\. 1; give a larger count"
    for call in (
        lambda: segment_reduce(TOKENS, ids, 2),
        lambda: sequence_mean(TOKENS, MASK, sequences),
        lambda: spread_to_tokens(torch.ones(2), MASK, sequences=sequences),
        lambda: linear_recurrence(0.5, TOKENS, beyond=torch.ones(2), sequences=sequences),
    ):
        with pytest.raises(ValueError, match=message):
            call()
