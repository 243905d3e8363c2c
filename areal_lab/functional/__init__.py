"""Pure maths of reinforcement learning for language models; torch and jaxtyping only.

A policy loss is a composition: anchor ratio -> surrogate -> weight chain -> aggregate.
"""

# The order is that of the topics.
# isort: off

# --- policy losses, and the protocol for your own
from areal_lab.functional.losses import (
    HasLoss,
    PlainLoss,
    PolicyLoss,
    PolicyLossResult,
    anchored_at_behavior,
    decoupled_ppo,
    policy_loss,
    ppo,
)

# --- the parts of a policy loss
from areal_lab.functional.ratios import AnchoredPolicy, AnchorRatio, token_ratio
from areal_lab.functional.surrogates import (
    ClipEpsilon,
    Surrogate,
    SurrogateFunction,
    clip_surrogate,
)
from areal_lab.functional.corrections import (
    BehaviorWeight,
    Correction,
    behavior_weight,
    chain,
    mask_above,
    truncate,
    unbounded,
)
from areal_lab.functional.aggregate import Aggregate, Count, sequence_mean, token_mean

# --- advantages
from areal_lab.functional.advantages import (
    Baseline,
    GroupedRewards,
    Scale,
    group_advantages,
    mean_of_group,
    mean_of_others,
    no_scale,
    std_of_batch,
    std_of_group,
)

# --- log-probs and entropy
from areal_lab.functional.logprobs import (
    LogprobsAndEntropy,
    logprobs_and_entropy,
    logprobs_and_entropy_from_logits,
)

# --- per-sample gradients
from areal_lab.functional.gradients import GradientSpread, gradient_spread_by_lag

# --- staleness, and the capacity arithmetic that `control` decides by
from areal_lab.capacity import admissible, lag_bound, open_slots
from areal_lab.functional.staleness import (
    TrajectoryLag,
    effective_sample_size,
    effective_sample_size_by_lag,
    lag_histogram,
    token_lag,
    trajectory_lag,
)

# --- masks and segments
from areal_lab.functional.masked import masked_mean, masked_quantiles, masked_sum, select
from areal_lab.functional.segments import (
    Segments,
    dense_ids,
    packed_sequence_ids,
    packed_sequences,
    padded_sequence_ids,
    segment_reduce,
    sequences_or_rows,
)

# isort: on

__all__ = [
    # policy losses
    "HasLoss",
    "PlainLoss",
    "PolicyLoss",
    "PolicyLossResult",
    "anchored_at_behavior",
    "decoupled_ppo",
    "policy_loss",
    "ppo",
    # parts of a policy loss
    "AnchorRatio",
    "AnchoredPolicy",
    "token_ratio",
    "ClipEpsilon",
    "Surrogate",
    "SurrogateFunction",
    "clip_surrogate",
    "BehaviorWeight",
    "Correction",
    "behavior_weight",
    "chain",
    "mask_above",
    "truncate",
    "unbounded",
    "Aggregate",
    "Count",
    "sequence_mean",
    "token_mean",
    # advantages
    "Baseline",
    "GroupedRewards",
    "Scale",
    "group_advantages",
    "mean_of_group",
    "mean_of_others",
    "no_scale",
    "std_of_batch",
    "std_of_group",
    # log-probs
    "LogprobsAndEntropy",
    "logprobs_and_entropy",
    "logprobs_and_entropy_from_logits",
    # staleness
    "admissible",
    "lag_bound",
    "open_slots",
    "TrajectoryLag",
    "effective_sample_size",
    "effective_sample_size_by_lag",
    "lag_histogram",
    "token_lag",
    "trajectory_lag",
    # per-sample gradients
    "GradientSpread",
    "gradient_spread_by_lag",
    # masks and segments
    "Segments",
    "dense_ids",
    "masked_mean",
    "masked_quantiles",
    "masked_sum",
    "packed_sequence_ids",
    "packed_sequences",
    "padded_sequence_ids",
    "segment_reduce",
    "sequences_or_rows",
    "select",
]
