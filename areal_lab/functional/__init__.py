"""Pure maths of reinforcement learning for language models; torch and jaxtyping only.

A policy loss is a composition: anchor ratio -> surrogate -> weight chain -> aggregate.
docs/functional/README.md is the map: one page per family.

Arguments of these names mean the same everywhere; a docstring describes one only if it means more:

    logprobs                log pi_theta of the sampled tokens; the only input with a gradient
    behavior_logprobs       log pi_behav, as the sampler reported them
    anchor_logprobs         log pi_anchor, the policy that a ratio is to
    reference_logprobs      log pi_ref of the same tokens
    advantages              A; without a gradient
    policy                  `AnchoredPolicy`: ratio to the anchor, log-probs, mask
    rewards                 R of each sample (and component), r of each token; with a gradient
    values                  one per token
    mask                    True where the policy chose the token; others, NaN too, do not count,
                            and an empty mask gives a loss of 0
    aggregate               `token_mean` or another; for micro-batches bind the counts of the whole
                            batch, as of the policy loss: `partial(token_mean, token_count=n)`
    sequences               `Segments`: the sequence of each token; None takes rows
    groups                  integer id of each sample's prompt; any numbers, any order
    holes                   `carry_over_holes` or `restart_at_holes`
    unbiased                divide squares by n - 1 rather than by n

Shapes that differ are refused with a ValueError.
"""

# The order is that of the topics.
# isort: off
from areal_lab.extras import require as _require

_require("areal_lab.functional", "train", "torch", "jaxtyping")

# --- policy losses, and the protocol for your own
from areal_lab.functional.losses.policy import (
    PolicyLossResult as PolicyLossResult,
    ConstrainedLossResult as ConstrainedLossResult,
    PlainLoss as PlainLoss,
    HasLoss as HasLoss,
    PolicyLoss as PolicyLoss,
    ppo as ppo,
    decoupled_ppo as decoupled_ppo,
    policy_loss as policy_loss,
    anchored_at_behavior as anchored_at_behavior,
)
from areal_lab.functional.losses.clipped import (
    grpo as grpo,
    dr_grpo as dr_grpo,
    dapo as dapo,
    dual_clip_ppo as dual_clip_ppo,
    clip_cov as clip_cov,
    kl_cov as kl_cov,
)
from areal_lab.functional.losses.corrected import (
    token_tis as token_tis,
    sequence_tis as sequence_tis,
    icepop as icepop,
    sequence_mis as sequence_mis,
    geometric_mis as geometric_mis,
    kpop as kpop,
    trm as trm,
    m2po as m2po,
    a3po as a3po,
)
from areal_lab.functional.losses.stale import (
    sat as sat,
    mu_grpo as mu_grpo,
    r2vpo as r2vpo,
)
from areal_lab.functional.losses.reinforce import (
    reinforce as reinforce,
    cispo as cispo,
    truncated_reinforce as truncated_reinforce,
    importance_sampling as importance_sampling,
    aipo as aipo,
    topr as topr,
    positive_nll as positive_nll,
)
from areal_lab.functional.losses.divergence import (
    dppo_tv as dppo_tv,
    dppo_kl as dppo_kl,
    prime_rl as prime_rl,
    kimi as kimi,
    dro as dro,
)
from areal_lab.functional.losses.sequence import (
    gspo as gspo,
    gspo_token as gspo_token,
    luspo as luspo,
    gmpo as gmpo,
    sapo as sapo,
    vespo as vespo,
)

# --- what a policy loss does to a token, and which inputs get a gradient
from areal_lab.functional.losses.surface import (
    LossSurface as LossSurface,
    loss_surface as loss_surface,
    ratio_path as ratio_path,
)
from areal_lab.functional.losses.gradient_check import (
    InputGradient as InputGradient,
    GradientCheck as GradientCheck,
    gradient_check as gradient_check,
)
from areal_lab.functional.losses.sample_gradients import (
    DriftingPolicy as DriftingPolicy,
    drifting_policy as drifting_policy,
    per_sample_gradients as per_sample_gradients,
    unbiased_gradient as unbiased_gradient,
)

# --- the parts of a policy loss: ratio, surrogate
from areal_lab.functional.ratios import (
    AnchoredPolicy as AnchoredPolicy,
    AnchorRatio as AnchorRatio,
    token_ratio as token_ratio,
    sequence_ratio as sequence_ratio,
    sequence_token_ratio as sequence_token_ratio,
    segment_ratio as segment_ratio,
    sequence_product_ratio as sequence_product_ratio,
)
from areal_lab.functional.surrogates.clip import (
    ClipEpsilon as ClipEpsilon,
    Surrogate as Surrogate,
    SurrogateFunction as SurrogateFunction,
    clip_surrogate as clip_surrogate,
    dual_clip_surrogate as dual_clip_surrogate,
    sat_surrogate as sat_surrogate,
)
from areal_lab.functional.surrogates.reinforce import (
    reinforce_surrogate as reinforce_surrogate,
    importance_surrogate as importance_surrogate,
    cispo_surrogate as cispo_surrogate,
    aipo_surrogate as aipo_surrogate,
    truncated_reinforce_surrogate as truncated_reinforce_surrogate,
    icepop_surrogate as icepop_surrogate,
    topr_surrogate as topr_surrogate,
    weighted_logprobs as weighted_logprobs,
)
from areal_lab.functional.surrogates.smooth import (
    sapo_surrogate as sapo_surrogate,
    gmpo_surrogate as gmpo_surrogate,
    vespo_surrogate as vespo_surrogate,
)
from areal_lab.functional.surrogates.divergence import (
    dppo_tv_surrogate as dppo_tv_surrogate,
    dppo_kl_surrogate as dppo_kl_surrogate,
    prime_rl_surrogate as prime_rl_surrogate,
    prime_rl_ipo_surrogate as prime_rl_ipo_surrogate,
)
from areal_lab.functional.surrogates.squared import (
    kimi_surrogate as kimi_surrogate,
    kimi_sequence_surrogate as kimi_sequence_surrogate,
    dro_surrogate as dro_surrogate,
    ratio_variance_surrogate as ratio_variance_surrogate,
)
from areal_lab.functional.surrogates.covariance import (
    clip_cov_surrogate as clip_cov_surrogate,
    kl_cov_surrogate as kl_cov_surrogate,
    advantage_covariance as advantage_covariance,
)

# --- the parts of a policy loss: correction, aggregate
from areal_lab.functional.corrections.weights import (
    BehaviorWeight as BehaviorWeight,
    Correction as Correction,
    behavior_weight as behavior_weight,
    unbounded as unbounded,
    truncate as truncate,
    mask_outside as mask_outside,
    mask_above as mask_above,
    keep as keep,
    self_normalize as self_normalize,
    over_segments as over_segments,
    chain as chain,
    replace_weight as replace_weight,
    drop as drop,
)
from areal_lab.functional.corrections.sequence import (
    SequenceStatistic as SequenceStatistic,
    sum_of_sequence as sum_of_sequence,
    mean_of_sequence as mean_of_sequence,
    max_of_sequence as max_of_sequence,
    sequence_product as sequence_product,
    sequence_geometric_mean as sequence_geometric_mean,
    mask_sequences_outside as mask_sequences_outside,
    mask_outlier_sequences as mask_outlier_sequences,
)
from areal_lab.functional.corrections.rejection import (
    Divergence as Divergence,
    reject as reject,
    mask_binary_kl as mask_binary_kl,
    divergence_mask as divergence_mask,
    probability_difference_mask as probability_difference_mask,
    off_policy_sequence_mask as off_policy_sequence_mask,
    veto_suffix_mask as veto_suffix_mask,
)
from areal_lab.functional.corrections.second_moment import (
    second_moment_mask as second_moment_mask,
    mask_second_moment as mask_second_moment,
)
from areal_lab.functional.aggregate import (
    Count as Count,
    Aggregate as Aggregate,
    token_mean as token_mean,
    token_sum as token_sum,
    sequence_mean as sequence_mean,
    sequence_sum_mean as sequence_sum_mean,
    fixed_length_mean as fixed_length_mean,
    prompt_mean as prompt_mean,
)

# --- proximal policies, entropy and KL terms
from areal_lab.functional.corrections.proximal import (
    a3po_proximal_logprobs as a3po_proximal_logprobs,
    linear_proximal_logprobs as linear_proximal_logprobs,
    EMAWeights as EMAWeights,
    ema_weights as ema_weights,
    ema_update as ema_update,
)
from areal_lab.functional.divergences.entropy import (
    entropy_bonus as entropy_bonus,
    adaptive_entropy_coefficient as adaptive_entropy_coefficient,
    linear_entropy_coefficient as linear_entropy_coefficient,
    top_entropy_mask as top_entropy_mask,
)
from areal_lab.functional.divergences.kl import (
    KLEstimator as KLEstimator,
    KLLoss as KLLoss,
    k1 as k1,
    k2 as k2,
    k3 as k3,
    absolute as absolute,
    straight_through as straight_through,
    clamped as clamped,
    kl_penalty as kl_penalty,
    kl_loss as kl_loss,
    full_kl as full_kl,
)
from areal_lab.functional.advantages.kl_rewards import (
    KLShapedRewards as KLShapedRewards,
    kl_shaped_rewards as kl_shaped_rewards,
    adaptive_kl_coefficient as adaptive_kl_coefficient,
)

# --- advantages of samples
from areal_lab.functional.advantages.group import (
    GroupedRewards as GroupedRewards,
    grouped_rewards as grouped_rewards,
    Baseline as Baseline,
    Scale as Scale,
    group_advantages as group_advantages,
    mean_of_group as mean_of_group,
    mean_of_others as mean_of_others,
    length_weighted_mean as length_weighted_mean,
    no_scale as no_scale,
    std_of_group as std_of_group,
    std_of_batch as std_of_batch,
    std_of_rewards as std_of_rewards,
    std_of_others as std_of_others,
    mean_reward_of_group as mean_reward_of_group,
)
from areal_lab.functional.advantages.named import (
    grpo_advantages as grpo_advantages,
    dr_grpo_advantages as dr_grpo_advantages,
    rloo_advantages as rloo_advantages,
    lite_ppo_advantages as lite_ppo_advantages,
    opo_advantages as opo_advantages,
    gpg_advantages as gpg_advantages,
    max_rl_advantages as max_rl_advantages,
    pass_at_k_advantages as pass_at_k_advantages,
    best_of_others as best_of_others,
    remax_advantages as remax_advantages,
)
from areal_lab.functional.advantages.multi_reward import (
    Weights as Weights,
    component_advantages as component_advantages,
    normalize_then_sum as normalize_then_sum,
    sum_then_normalize as sum_then_normalize,
    gdpo_advantages as gdpo_advantages,
)
from areal_lab.functional.advantages.agent import (
    gigpo_advantages as gigpo_advantages,
    AgentAdvantages as AgentAdvantages,
    rae_advantages as rae_advantages,
)
from areal_lab.functional.advantages.difficulty import (
    SampleAdvantages as SampleAdvantages,
    AdvantagesByCount as AdvantagesByCount,
    PromptWeight as PromptWeight,
    advantages_by_count as advantages_by_count,
    prompt_weight as prompt_weight,
)
from areal_lab.functional.advantages.whitening import (
    Moments as Moments,
    token_moments as token_moments,
    add_moments as add_moments,
    whiten as whiten,
    spread_to_tokens as spread_to_tokens,
    reinforce_plus_plus_advantages as reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages as reinforce_plus_plus_baseline_advantages,
)

# --- returns and advantages of tokens
from areal_lab.functional.advantages.recurrence import (
    linear_recurrence as linear_recurrence,
    next_in_sequence as next_in_sequence,
)
from areal_lab.functional.segments import (
    sequence_edges as sequence_edges,
)
from areal_lab.functional.advantages.returns import (
    Discount as Discount,
    terminal_rewards as terminal_rewards,
    discounted_returns as discounted_returns,
    reinforce_plus_plus_returns as reinforce_plus_plus_returns,
    turn_returns as turn_returns,
)
from areal_lab.functional.advantages.gae import (
    AdvantagesAndReturns as AdvantagesAndReturns,
    gae as gae,
    gae_advantages as gae_advantages,
    lambda_returns as lambda_returns,
    length_adaptive_lambda as length_adaptive_lambda,
)
from areal_lab.functional.advantages.v_trace import (
    vtrace as vtrace,
    leaky_vtrace as leaky_vtrace,
)
from areal_lab.functional.advantages.token_baseline import (
    optimal_token_baseline as optimal_token_baseline,
)

# --- rewards before, and filters after
from areal_lab.functional.advantages.reward_shaping import (
    shape_rewards as shape_rewards,
    overlong_penalty as overlong_penalty,
    NormalizedRewards as NormalizedRewards,
    no_moments as no_moments,
    normalize_rewards as normalize_rewards,
    clip_advantages as clip_advantages,
)
from areal_lab.functional.advantages.filters import (
    zero_variance_groups as zero_variance_groups,
    difficulty_band as difficulty_band,
    overlong_mask as overlong_mask,
    keep_samples as keep_samples,
)

# --- evaluation
from areal_lab.functional.pass_at_k import pass_at_k as pass_at_k

# --- supervised, preference and distillation losses
from areal_lab.functional.losses.supervised import (
    ErrorFunction as ErrorFunction,
    SFTLoss as SFTLoss,
    ValueLoss as ValueLoss,
    sft_loss as sft_loss,
    value_loss as value_loss,
    half_squared_error as half_squared_error,
    squared_error as squared_error,
    huber_error as huber_error,
)
from areal_lab.functional.losses.preference import (
    PreferenceObjective as PreferenceObjective,
    PreferenceLoss as PreferenceLoss,
    BradleyTerryLoss as BradleyTerryLoss,
    sequence_logprob_sums as sequence_logprob_sums,
    sequence_logprob_means as sequence_logprob_means,
    dpo_loss as dpo_loss,
    ipo_loss as ipo_loss,
    preference_loss as preference_loss,
    logistic_objective as logistic_objective,
    squared_objective as squared_objective,
    bradley_terry_loss as bradley_terry_loss,
)
from areal_lab.functional.losses.distillation import (
    Tail as Tail,
    OnPolicyDistillationLoss as OnPolicyDistillationLoss,
    DistillationLoss as DistillationLoss,
    distillation_advantages as distillation_advantages,
    on_policy_distillation_loss as on_policy_distillation_loss,
    distillation_loss as distillation_loss,
    lump_tail as lump_tail,
    renormalize_tail as renormalize_tail,
    drop_tail as drop_tail,
    topk_distillation_loss as topk_distillation_loss,
)
from areal_lab.functional.divergences.vocabulary import (
    VocabularyDivergence as VocabularyDivergence,
    forward_kl as forward_kl,
    reverse_kl as reverse_kl,
    generalized_jsd as generalized_jsd,
    log_distribution as log_distribution,
)

# --- log-probs and entropy
from areal_lab.functional.logprobs.token_logprobs import (
    LogprobsAndEntropy as LogprobsAndEntropy,
    logprobs_and_entropy as logprobs_and_entropy,
    logprobs_and_entropy_from_logits as logprobs_and_entropy_from_logits,
    squared_probs as squared_probs,
    squared_probs_from_logits as squared_probs_from_logits,
)
from areal_lab.functional.logprobs.tiles import VocabularyPart as VocabularyPart
from areal_lab.functional.logprobs.cutoff import (
    Cutoff as Cutoff,
    top_k as top_k,
    top_p as top_p,
    min_p as min_p,
    in_turn as in_turn,
)

# --- staleness, and the capacity arithmetic that `control` decides by
from areal_lab.capacity import (
    admissible as admissible,
    open_slots as open_slots,
    lag_bound as lag_bound,
    MeanStaleness as MeanStaleness,
    mean_staleness_bounded as mean_staleness_bounded,
    mean_staleness_dropping as mean_staleness_dropping,
)
from areal_lab.functional.staleness.lag import (
    TrajectoryLag as TrajectoryLag,
    token_lag as token_lag,
    trajectory_lag as trajectory_lag,
    lag_histogram as lag_histogram,
    mean_by_lag as mean_by_lag,
    effective_sample_size as effective_sample_size,
    effective_sample_share as effective_sample_share,
    effective_sample_size_of_logs as effective_sample_size_of_logs,
    effective_sample_size_by_lag as effective_sample_size_by_lag,
)
from areal_lab.functional.divergences.sampled import (
    KLEstimates as KLEstimates,
    kl_from_sampler as kl_from_sampler,
    kl_to_sampler as kl_to_sampler,
    chi_square as chi_square,
    total_variation as total_variation,
    jensen_shannon as jensen_shannon,
    log_ratio_histogram as log_ratio_histogram,
    binary_kl as binary_kl,
)
from areal_lab.functional.staleness.diagnostics import (
    OffPolicyDiagnostics as OffPolicyDiagnostics,
    DivergenceByLag as DivergenceByLag,
    off_policy_diagnostics as off_policy_diagnostics,
    divergence_by_lag as divergence_by_lag,
)
from areal_lab.functional.staleness.control import (
    StepScale as StepScale,
    AlignedPart as AlignedPart,
    age_weights as age_weights,
    learning_rate_scale as learning_rate_scale,
    aligned_part as aligned_part,
    weight_deviation as weight_deviation,
)
from areal_lab.functional.staleness.gradient_spread import (
    GradientSpread as GradientSpread,
    gradient_alignment_by_lag as gradient_alignment_by_lag,
    gradient_spread_by_lag as gradient_spread_by_lag,
)

# --- masks and segments
from areal_lab.functional.masked import (
    select as select,
    masked_sum as masked_sum,
    masked_mean as masked_mean,
    masked_quantiles as masked_quantiles,
)
from areal_lab.functional.segments import (
    Reduction as Reduction,
    Segments as Segments,
    sequences_or_rows as sequences_or_rows,
    packed_sequences as packed_sequences,
    segment_reduce as segment_reduce,
    padded_sequence_ids as padded_sequence_ids,
    packed_sequence_ids as packed_sequence_ids,
    dense_ids as dense_ids,
    unmasked_runs as unmasked_runs,
)
from areal_lab.functional.advantages.returns import (
    Holes as Holes,
    carry_over_holes as carry_over_holes,
    restart_at_holes as restart_at_holes,
    last_unmasked as last_unmasked,
)

# isort: on

from types import ModuleType as _Module

# The imports above are the one list of names.
__all__ = [
    name
    for name, value in list(globals().items())
    if not name.startswith("_") and not isinstance(value, _Module)
]
