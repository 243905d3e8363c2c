"""Pure maths of reinforcement learning for language models; torch and jaxtyping only.

A policy loss is a composition: anchor ratio -> surrogate -> weight chain -> aggregate.
docs/functional/README.md is the map: one page per family.
"""

# The order is that of the topics.
# isort: off

# --- policy losses, and the protocol for your own
from areal_lab.functional.losses.policy import (
    PolicyLossResult,
    PlainLoss,
    HasLoss,
    PolicyLoss,
    ppo,
    decoupled_ppo,
    policy_loss,
    anchored_at_behavior,
)
from areal_lab.functional.losses.clipped import (
    grpo,
    dr_grpo,
    dapo,
    dual_clip_ppo,
    clip_cov,
    kl_cov,
)
from areal_lab.functional.losses.corrected import (
    token_tis,
    sequence_tis,
    icepop,
    sequence_mis,
    geometric_mis,
    m2po,
    a3po,
)
from areal_lab.functional.losses.reinforce import (
    reinforce,
    cispo,
    truncated_reinforce,
    importance_sampling,
    aipo,
    topr,
    positive_nll,
)
from areal_lab.functional.losses.divergence import (
    dppo_tv,
    dppo_kl,
    prime_rl,
    kimi,
    dro,
)
from areal_lab.functional.losses.sequence import (
    gspo,
    gspo_token,
    luspo,
    gmpo,
    sapo,
    vespo,
)

# --- the parts of a policy loss: ratio, surrogate
from areal_lab.functional.ratios import (
    AnchoredPolicy,
    AnchorRatio,
    token_ratio,
    sequence_ratio,
    sequence_token_ratio,
    segment_ratio,
    sequence_product_ratio,
)
from areal_lab.functional.surrogates.clip import (
    ClipEpsilon,
    Surrogate,
    SurrogateFunction,
    clip_surrogate,
    dual_clip_surrogate,
)
from areal_lab.functional.surrogates.reinforce import (
    reinforce_surrogate,
    importance_surrogate,
    cispo_surrogate,
    aipo_surrogate,
    truncated_reinforce_surrogate,
    icepop_surrogate,
    topr_surrogate,
    weighted_logprobs,
)
from areal_lab.functional.surrogates.smooth import (
    sapo_surrogate,
    gmpo_surrogate,
    vespo_surrogate,
)
from areal_lab.functional.surrogates.divergence import (
    dppo_tv_surrogate,
    dppo_kl_surrogate,
    prime_rl_surrogate,
    prime_rl_ipo_surrogate,
)
from areal_lab.functional.surrogates.squared import (
    kimi_surrogate,
    kimi_sequence_surrogate,
    dro_surrogate,
)
from areal_lab.functional.surrogates.covariance import (
    clip_cov_surrogate,
    kl_cov_surrogate,
    advantage_covariance,
)

# --- the parts of a policy loss: correction, aggregate
from areal_lab.functional.corrections.weights import (
    BehaviorWeight,
    Correction,
    behavior_weight,
    unbounded,
    truncate,
    mask_outside,
    mask_above,
    keep,
    self_normalize,
    over_segments,
    chain,
    replace_weight,
    drop,
)
from areal_lab.functional.corrections.sequence import (
    SequenceStatistic,
    sum_of_sequence,
    mean_of_sequence,
    max_of_sequence,
    sequence_product,
    sequence_geometric_mean,
    mask_sequences_outside,
    mask_outlier_sequences,
)
from areal_lab.functional.corrections.rejection import (
    Divergence,
    reject,
    divergence_mask,
    probability_difference_mask,
    off_policy_sequence_mask,
)
from areal_lab.functional.corrections.second_moment import (
    second_moment_mask,
    mask_second_moment,
)
from areal_lab.functional.aggregate import (
    Count,
    Aggregate,
    token_mean,
    token_sum,
    sequence_mean,
    sequence_sum_mean,
    fixed_length_mean,
    prompt_mean,
)

# --- proximal policies, entropy and KL terms
from areal_lab.functional.corrections.proximal import (
    a3po_proximal_logprobs,
    linear_proximal_logprobs,
    EMAWeights,
    ema_weights,
    ema_update,
)
from areal_lab.functional.divergences.entropy import (
    entropy_bonus,
    adaptive_entropy_coefficient,
    linear_entropy_coefficient,
    top_entropy_mask,
)
from areal_lab.functional.divergences.kl import (
    KLEstimator,
    KLLoss,
    k1,
    k2,
    k3,
    absolute,
    straight_through,
    clamped,
    kl_penalty,
    kl_loss,
    full_kl,
)
from areal_lab.functional.advantages.kl_rewards import (
    KLShapedRewards,
    kl_shaped_rewards,
    adaptive_kl_coefficient,
)

# --- advantages of samples
from areal_lab.functional.advantages.group import (
    GroupedRewards,
    grouped_rewards,
    Baseline,
    Scale,
    group_advantages,
    mean_of_group,
    mean_of_others,
    length_weighted_mean,
    no_scale,
    std_of_group,
    std_of_batch,
    std_of_rewards,
    std_of_others,
    mean_reward_of_group,
)
from areal_lab.functional.advantages.named import (
    grpo_advantages,
    dr_grpo_advantages,
    rloo_advantages,
    lite_ppo_advantages,
    opo_advantages,
    gpg_advantages,
    max_rl_advantages,
    pass_at_k_advantages,
    best_of_others,
    remax_advantages,
)
from areal_lab.functional.advantages.multi_reward import (
    Weights,
    component_advantages,
    normalize_then_sum,
    sum_then_normalize,
    gdpo_advantages,
)
from areal_lab.functional.advantages.agent import (
    gigpo_advantages,
    AgentAdvantages,
    rae_advantages,
)
from areal_lab.functional.advantages.whitening import (
    Moments,
    token_moments,
    add_moments,
    whiten,
    spread_to_tokens,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)

# --- returns and advantages of tokens
from areal_lab.functional.advantages.recurrence import (
    linear_recurrence,
    next_in_sequence,
    sequence_edges,
)
from areal_lab.functional.advantages.returns import (
    Discount,
    terminal_rewards,
    discounted_returns,
    reinforce_plus_plus_returns,
    turn_returns,
)
from areal_lab.functional.advantages.gae import (
    AdvantagesAndReturns,
    gae,
    lambda_returns,
    length_adaptive_lambda,
)
from areal_lab.functional.advantages.v_trace import (
    vtrace,
    leaky_vtrace,
)
from areal_lab.functional.advantages.token_baseline import (
    optimal_token_baseline,
)

# --- rewards before, and filters after
from areal_lab.functional.advantages.reward_shaping import (
    shape_rewards,
    overlong_penalty,
    NormalizedRewards,
    no_moments,
    normalize_rewards,
    clip_advantages,
)
from areal_lab.functional.advantages.filters import (
    zero_variance_groups,
    difficulty_band,
    overlong_mask,
    keep_samples,
)

# --- supervised, preference and distillation losses
from areal_lab.functional.losses.supervised import (
    ErrorFunction,
    SFTLoss,
    ValueLoss,
    sft_loss,
    value_loss,
    half_squared_error,
    squared_error,
    huber_error,
)
from areal_lab.functional.losses.preference import (
    PreferenceObjective,
    PreferenceLoss,
    BradleyTerryLoss,
    sequence_logprob_sums,
    sequence_logprob_means,
    dpo_loss,
    ipo_loss,
    preference_loss,
    logistic_objective,
    squared_objective,
    bradley_terry_loss,
)
from areal_lab.functional.losses.distillation import (
    Tail,
    OnPolicyDistillationLoss,
    DistillationLoss,
    distillation_advantages,
    on_policy_distillation_loss,
    distillation_loss,
    lump_tail,
    renormalize_tail,
    drop_tail,
    topk_distillation_loss,
)
from areal_lab.functional.divergences.vocabulary import (
    VocabularyDivergence,
    forward_kl,
    reverse_kl,
    generalized_jsd,
    log_distribution,
)

# --- log-probs and entropy
from areal_lab.functional.logprobs.token_logprobs import (
    LogprobsAndEntropy,
    logprobs_and_entropy,
    logprobs_and_entropy_from_logits,
    squared_probs,
    squared_probs_from_logits,
)
from areal_lab.functional.logprobs.cutoff import (
    Cutoff,
    top_k,
    top_p,
    min_p,
    in_turn,
)

# --- staleness, and the capacity arithmetic that `control` decides by
from areal_lab.capacity import (
    admissible,
    open_slots,
    lag_bound,
)
from areal_lab.functional.staleness.lag import (
    TrajectoryLag,
    token_lag,
    trajectory_lag,
    lag_histogram,
    mean_by_lag,
    effective_sample_size,
    effective_sample_share,
    effective_sample_size_of_logs,
    effective_sample_size_by_lag,
)
from areal_lab.functional.divergences.sampled import (
    KLEstimates,
    kl_from_sampler,
    kl_to_sampler,
    chi_square,
    total_variation,
    jensen_shannon,
    log_ratio_histogram,
)
from areal_lab.functional.staleness.diagnostics import (
    OffPolicyDiagnostics,
    DivergenceByLag,
    off_policy_diagnostics,
    divergence_by_lag,
)
from areal_lab.functional.staleness.gradient_spread import (
    GradientSpread,
    gradient_spread_by_lag,
)

# --- masks and segments
from areal_lab.functional.masked import (
    select,
    masked_sum,
    masked_mean,
    masked_quantiles,
)
from areal_lab.functional.segments import (
    Reduction,
    Segments,
    sequences_or_rows,
    packed_sequences,
    segment_reduce,
    padded_sequence_ids,
    packed_sequence_ids,
    dense_ids,
)
from areal_lab.functional.advantages.holes import (
    Holes,
    carry_over_holes,
    restart_at_holes,
    last_unmasked,
    unmasked_runs,
)

# isort: on

__all__ = [
    # policy losses, and the protocol for your own
    "PolicyLossResult",
    "PlainLoss",
    "HasLoss",
    "PolicyLoss",
    "ppo",
    "decoupled_ppo",
    "policy_loss",
    "anchored_at_behavior",
    "grpo",
    "dr_grpo",
    "dapo",
    "dual_clip_ppo",
    "clip_cov",
    "kl_cov",
    "token_tis",
    "sequence_tis",
    "icepop",
    "sequence_mis",
    "geometric_mis",
    "m2po",
    "a3po",
    "reinforce",
    "cispo",
    "truncated_reinforce",
    "importance_sampling",
    "aipo",
    "topr",
    "positive_nll",
    "dppo_tv",
    "dppo_kl",
    "prime_rl",
    "kimi",
    "dro",
    "gspo",
    "gspo_token",
    "luspo",
    "gmpo",
    "sapo",
    "vespo",
    # the parts of a policy loss: ratio, surrogate
    "AnchoredPolicy",
    "AnchorRatio",
    "token_ratio",
    "sequence_ratio",
    "sequence_token_ratio",
    "segment_ratio",
    "sequence_product_ratio",
    "ClipEpsilon",
    "Surrogate",
    "SurrogateFunction",
    "clip_surrogate",
    "dual_clip_surrogate",
    "reinforce_surrogate",
    "importance_surrogate",
    "cispo_surrogate",
    "aipo_surrogate",
    "truncated_reinforce_surrogate",
    "icepop_surrogate",
    "topr_surrogate",
    "weighted_logprobs",
    "sapo_surrogate",
    "gmpo_surrogate",
    "vespo_surrogate",
    "dppo_tv_surrogate",
    "dppo_kl_surrogate",
    "prime_rl_surrogate",
    "prime_rl_ipo_surrogate",
    "kimi_surrogate",
    "kimi_sequence_surrogate",
    "dro_surrogate",
    "clip_cov_surrogate",
    "kl_cov_surrogate",
    "advantage_covariance",
    # the parts of a policy loss: correction, aggregate
    "BehaviorWeight",
    "Correction",
    "behavior_weight",
    "unbounded",
    "truncate",
    "mask_outside",
    "mask_above",
    "keep",
    "self_normalize",
    "over_segments",
    "chain",
    "replace_weight",
    "drop",
    "SequenceStatistic",
    "sum_of_sequence",
    "mean_of_sequence",
    "max_of_sequence",
    "sequence_product",
    "sequence_geometric_mean",
    "mask_sequences_outside",
    "mask_outlier_sequences",
    "Divergence",
    "reject",
    "divergence_mask",
    "probability_difference_mask",
    "off_policy_sequence_mask",
    "second_moment_mask",
    "mask_second_moment",
    "Count",
    "Aggregate",
    "token_mean",
    "token_sum",
    "sequence_mean",
    "sequence_sum_mean",
    "fixed_length_mean",
    "prompt_mean",
    # proximal policies, entropy and KL terms
    "a3po_proximal_logprobs",
    "linear_proximal_logprobs",
    "EMAWeights",
    "ema_weights",
    "ema_update",
    "entropy_bonus",
    "adaptive_entropy_coefficient",
    "linear_entropy_coefficient",
    "top_entropy_mask",
    "KLEstimator",
    "KLLoss",
    "k1",
    "k2",
    "k3",
    "absolute",
    "straight_through",
    "clamped",
    "kl_penalty",
    "kl_loss",
    "full_kl",
    "KLShapedRewards",
    "kl_shaped_rewards",
    "adaptive_kl_coefficient",
    # advantages of samples
    "GroupedRewards",
    "grouped_rewards",
    "Baseline",
    "Scale",
    "group_advantages",
    "mean_of_group",
    "mean_of_others",
    "length_weighted_mean",
    "no_scale",
    "std_of_group",
    "std_of_batch",
    "std_of_rewards",
    "std_of_others",
    "mean_reward_of_group",
    "grpo_advantages",
    "dr_grpo_advantages",
    "rloo_advantages",
    "lite_ppo_advantages",
    "opo_advantages",
    "gpg_advantages",
    "max_rl_advantages",
    "pass_at_k_advantages",
    "best_of_others",
    "remax_advantages",
    "Weights",
    "component_advantages",
    "normalize_then_sum",
    "sum_then_normalize",
    "gdpo_advantages",
    "gigpo_advantages",
    "AgentAdvantages",
    "rae_advantages",
    "Moments",
    "token_moments",
    "add_moments",
    "whiten",
    "spread_to_tokens",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    # returns and advantages of tokens
    "linear_recurrence",
    "next_in_sequence",
    "sequence_edges",
    "Discount",
    "terminal_rewards",
    "discounted_returns",
    "reinforce_plus_plus_returns",
    "turn_returns",
    "AdvantagesAndReturns",
    "gae",
    "lambda_returns",
    "length_adaptive_lambda",
    "vtrace",
    "leaky_vtrace",
    "optimal_token_baseline",
    # rewards before, and filters after
    "shape_rewards",
    "overlong_penalty",
    "NormalizedRewards",
    "no_moments",
    "normalize_rewards",
    "clip_advantages",
    "zero_variance_groups",
    "difficulty_band",
    "overlong_mask",
    "keep_samples",
    # supervised, preference and distillation losses
    "ErrorFunction",
    "SFTLoss",
    "ValueLoss",
    "sft_loss",
    "value_loss",
    "half_squared_error",
    "squared_error",
    "huber_error",
    "PreferenceObjective",
    "PreferenceLoss",
    "BradleyTerryLoss",
    "sequence_logprob_sums",
    "sequence_logprob_means",
    "dpo_loss",
    "ipo_loss",
    "preference_loss",
    "logistic_objective",
    "squared_objective",
    "bradley_terry_loss",
    "Tail",
    "OnPolicyDistillationLoss",
    "DistillationLoss",
    "distillation_advantages",
    "on_policy_distillation_loss",
    "distillation_loss",
    "lump_tail",
    "renormalize_tail",
    "drop_tail",
    "topk_distillation_loss",
    "VocabularyDivergence",
    "forward_kl",
    "reverse_kl",
    "generalized_jsd",
    "log_distribution",
    # log-probs and entropy
    "LogprobsAndEntropy",
    "logprobs_and_entropy",
    "logprobs_and_entropy_from_logits",
    "squared_probs",
    "squared_probs_from_logits",
    "Cutoff",
    "top_k",
    "top_p",
    "min_p",
    "in_turn",
    # staleness, and the capacity arithmetic that `control` decides by
    "admissible",
    "open_slots",
    "lag_bound",
    "TrajectoryLag",
    "token_lag",
    "trajectory_lag",
    "lag_histogram",
    "mean_by_lag",
    "effective_sample_size",
    "effective_sample_share",
    "effective_sample_size_of_logs",
    "effective_sample_size_by_lag",
    "KLEstimates",
    "kl_from_sampler",
    "kl_to_sampler",
    "chi_square",
    "total_variation",
    "jensen_shannon",
    "log_ratio_histogram",
    "OffPolicyDiagnostics",
    "DivergenceByLag",
    "off_policy_diagnostics",
    "divergence_by_lag",
    "GradientSpread",
    "gradient_spread_by_lag",
    # masks and segments
    "select",
    "masked_sum",
    "masked_mean",
    "masked_quantiles",
    "Reduction",
    "Segments",
    "sequences_or_rows",
    "packed_sequences",
    "segment_reduce",
    "padded_sequence_ids",
    "packed_sequence_ids",
    "dense_ids",
    "Holes",
    "carry_over_holes",
    "restart_at_holes",
    "last_unmasked",
    "unmasked_runs",
]
