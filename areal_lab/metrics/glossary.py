"""Table of every metric of metrics.jsonl: unit, meaning, healthy range, and causes of other
values.

`docs/metrics.md` is generated from this table; a test compares it with what runs write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Group: TypeAlias = Literal[
    "Progress", "Rewards", "Responses", "Staleness", "Policy", "Optimizer", "Critic", "Work"
]
WrittenBy: TypeAlias = Literal["train and cosim", "train", "cosim"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    group: Group
    unit: str
    """Unit; empty for numbers without one."""
    meaning: str
    healthy: str = ""
    """Healthy range; empty if every value is healthy."""
    outside: str = ""
    """Meaning of a value outside the range, and a remedy."""
    source: str
    """Part of the run that measures it."""
    written_by: WrittenBy = "train and cosim"
    always: bool = True
    """True if every line of metrics.jsonl has the metric."""
    on_gpu: bool = False
    """True if only a trainer on a GPU writes it."""


_TRAINER: Final = "trainer"
_TOKENS: Final = "trainer, over the tokens in the forward pass"
_PIPELINE: Final = "pipeline"

GLOSSARY: Final[tuple[Metric, ...]] = (
    Metric(
        name="step",
        group="Progress",
        unit="steps",
        meaning="Number of the training step, from 1.",
        source=_PIPELINE,
    ),
    Metric(
        name="version",
        group="Progress",
        unit="versions",
        meaning="Version of the weights that the step produced; equal to `step`.",
        source=_PIPELINE,
    ),
    Metric(
        name="time_s",
        group="Progress",
        unit="s",
        meaning="Time from the start of training to the end of the step; in `cosim`, time of the "
        "cluster.",
        source=_PIPELINE,
    ),
    Metric(
        name="simulated_hours",
        group="Progress",
        unit="h",
        meaning="`time_s` in hours.",
        source=_PIPELINE,
        written_by="cosim",
    ),
    Metric(
        name="step_s",
        group="Progress",
        unit="s",
        meaning="Time since the end of the previous step, including waiting.",
        healthy="steady",
        outside="Growing: responses become longer, or engines were lost; `areal-lab trace RUN` "
        "shows what each process waits for.",
        source=_PIPELINE,
    ),
    Metric(
        name="tokens_per_s",
        group="Progress",
        unit="tokens/s",
        meaning="Generated tokens of the groups that ended since the previous step, divided by "
        "`step_s`.",
        healthy="steady",
        outside="Falling: engines wait (staleness bound, weights, a lost engine); "
        "`areal-lab watch RUN` shows the cause.",
        source=_PIPELINE,
    ),
    Metric(
        name="reward_mean",
        group="Rewards",
        unit="",
        meaning="Mean reward of the batch. Asynchronous batches are not a random sample: groups "
        "that finish early come first.",
        healthy="rising, or steady at its best",
        outside="Falling for long: alarm `reward_drop`. Compare the held-out reward.",
        source=_TRAINER,
    ),
    Metric(
        name="reward_std",
        group="Rewards",
        unit="",
        meaning="Standard deviation of the rewards of the batch.",
        healthy="> 0",
        outside="0: all rewards are equal, see `zero_advantage_samples`.",
        source=_TRAINER,
    ),
    Metric(
        name="right_share",
        group="Rewards",
        unit="share",
        meaning="Share of the batch's samples with a reward of at least 1, or whose last turn has "
        "one.",
        healthy="rising",
        outside="0 for long: too hard, or rewards that are never 1. `summary.json` counts all "
        "samples by `outcomes`.",
        source=_PIPELINE,
        written_by="train",
    ),
    Metric(
        name="no_answer_share",
        group="Rewards",
        unit="share",
        meaning="Share of the batch's samples that are not right and were cut off, or whose "
        "reward function found no answer (a component `no_answer`).",
        healthy="falling to 0",
        outside="Rising: raise `gconfig.max_new_tokens` or `max_turns`, or show the form of an "
        "answer in the prompt.",
        source=_PIPELINE,
        written_by="train",
    ),
    Metric(
        name="zero_advantage_samples",
        group="Rewards",
        unit="samples",
        meaning="Samples with an advantage of 0, usually because all rewards of their group are "
        "equal. PPO does not compute them.",
        healthy="< 90 % of `trained_samples` while the task is not solved",
        outside="Alarm `equal_rewards`: problems too hard or too easy, or a reward function that "
        "gives one value. Mix problems, raise `gconfig.n_samples`, check `reward.fn`.",
        source=_TRAINER,
    ),
    Metric(
        name="overlong_penalty_mean",
        group="Rewards",
        unit="",
        meaning="Mean deduction from the rewards of long responses (`actor.overlong_share`). "
        "`reward_mean` does not include it.",
        healthy="near 0",
        outside="Falling: responses grow towards `gconfig.max_new_tokens`.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="held_out_reward",
        group="Rewards",
        unit="",
        meaning="Mean reward of the weights after this step on held-out problems. Other "
        "measurements of a run are in held_out.jsonl.",
        healthy="rising, or steady at its best",
        outside="Alarm `reward_drop`: lower `actor.optimizer.lr` or eta, continue from an earlier "
        "checkpoint.",
        source="evaluation",
        written_by="cosim",
        always=False,
    ),
    Metric(
        name="trained_groups",
        group="Responses",
        unit="groups",
        meaning="Prompts in the batch.",
        healthy="`dataset.batch_size`",
        outside="Fewer: `rollout.dynamic_sampling` found no more groups with different rewards; "
        "the problems have become too easy, or are too hard.",
        source=_TRAINER,
    ),
    Metric(
        name="filtered_groups",
        group="Responses",
        unit="groups",
        meaning="Groups that ended since the previous step and are not trained on: equal rewards "
        "under `rollout.dynamic_sampling`, or a reward function that failed.",
        healthy="fewer than `dataset.batch_size`",
        outside="Most of the generated tokens are discarded: use harder or easier problems, "
        "or raise `gconfig.n_samples`.",
        source=_PIPELINE,
    ),
    Metric(
        name="trained_samples",
        group="Responses",
        unit="samples",
        meaning="Responses in the batch.",
        source=_TRAINER,
    ),
    Metric(
        name="turns_mean",
        group="Responses",
        unit="turns",
        meaning="Mean number of the model's turns in a sample, over all rows; for workflows with "
        "several turns.",
        source=_TRAINER,
        written_by="train",
        always=False,
    ),
    Metric(
        name="turns_max",
        group="Responses",
        unit="turns",
        meaning="Most turns of a row.",
        source=_TRAINER,
        written_by="train",
        always=False,
    ),
    Metric(
        name="rows_per_sample",
        group="Responses",
        unit="rows",
        meaning="Mean number of rows of a sample: branches of its conversation.",
        healthy="1, unless the agent has sub-agents",
        outside="The agent rewrites its history, so less of a prefix is shared; the counts of "
        "forks name the cause.",
        source=_TRAINER,
        written_by="train",
        always=False,
    ),
    Metric(
        name="tool_calls_mean",
        group="Responses",
        unit="calls",
        meaning="Mean number of tool calls of a sample.",
        source=_PIPELINE,
        written_by="train",
        always=False,
    ),
    Metric(
        name="tool_user_share",
        group="Responses",
        unit="share",
        meaning="Share of samples that called a tool.",
        source=_PIPELINE,
        written_by="train",
        always=False,
    ),
    Metric(
        name="tool_failure_share",
        group="Responses",
        unit="share",
        meaning="Share of tool calls that failed, timed out, named an unknown tool, could not be "
        "parsed, or came in the last turn.",
        healthy="falling to 0",
        outside="`trajectories/` has the outcome of each call.",
        source=_PIPELINE,
        written_by="train",
        always=False,
    ),
    Metric(
        name="tool_malformed_share",
        group="Responses",
        unit="share",
        meaning="Share of tool calls that could not be parsed: invalid JSON, or a fence that is "
        "not closed. The model got an error as the result.",
        healthy="falling to 0",
        outside="Rising: the turn ends too early; raise `gconfig.max_new_tokens`, check "
        "`gconfig.stop`.",
        source=_PIPELINE,
        written_by="train",
        always=False,
    ),
    Metric(
        name="tool_timeout_share",
        group="Responses",
        unit="share",
        meaning="Share of tool calls that took longer than their time limit.",
        healthy="near 0",
        outside="The tool or the machine is too slow, or programs do not end; see `timeout_s` of "
        "the workflow.",
        source=_PIPELINE,
        written_by="train",
        always=False,
    ),
    Metric(
        name="trained_tokens",
        group="Responses",
        unit="tokens",
        meaning="Generated tokens in the batch.",
        source=_TRAINER,
    ),
    Metric(
        name="response_tokens_mean",
        group="Responses",
        unit="tokens",
        meaning="Mean length of a response.",
        healthy="below `gconfig.max_new_tokens`",
        outside="Near the limit: see `truncated_share`. Near 0: the model ends at once; check "
        "`gconfig.stop` and what the reward prefers.",
        source=_TRAINER,
    ),
    Metric(
        name="response_tokens_max",
        group="Responses",
        unit="tokens",
        meaning="Longest response.",
        source=_TRAINER,
    ),
    Metric(
        name="truncated_share",
        group="Responses",
        unit="share",
        meaning="Share of responses that ended at `gconfig.max_new_tokens`.",
        healthy="< 0.5 while the task is not solved; 0 is best",
        outside="Alarm `truncated`: raise `gconfig.max_new_tokens`, check `gconfig.stop`.",
        source=_TRAINER,
    ),
    Metric(
        name="masked_samples",
        group="Responses",
        unit="samples",
        meaning="Responses without a loss because they were cut off (`actor.mask_truncated`).",
        healthy="below half of `trained_samples`",
        outside="See `truncated_share`.",
        source=_TRAINER,
        always=False,
    ),
    *(
        Metric(
            name=f"lag_{kind}_{what}",
            group="Staleness",
            unit="versions",
            meaning=f"{word} lag, trainer's version minus the version that generated it, of {of}.",
            healthy="at most eta (mean); eta + 1 occurs when finished groups overtake others",
            outside="Alarm `stale_weights`: pushes are late or fail, or eta is inf; set eta.",
            source=_TRAINER,
        )
        for kind, of in (
            ("head", "the first token of each response"),
            ("tail", "the last token of each response"),
            ("token", "all generated tokens"),
        )
        for what, word in (("mean", "Mean"), ("max", "Largest"))
    ),
    *(
        Metric(
            name=f"lag_{part}_mean",
            group="Staleness",
            unit="versions",
            meaning=meaning,
            healthy=healthy,
            outside=outside,
            source=_PIPELINE,
        )
        for part, meaning, healthy, outside in (
            (
                "before_queue",
                "Mean number of versions that passed while the groups of the batch were generated "
                "and scored. With `lag_in_queue_mean` it sums to the lag of first tokens.",
                "below eta",
                "Responses are long for the time of a step, or too many groups are in flight: "
                "lower `max_concurrent_rollouts`, or bound the length.",
            ),
            (
                "in_queue",
                "Mean number of versions that passed while the finished groups of the batch waited "
                "for training.",
                "at most 1",
                "The engines are faster than the trainer: lower eta, or give the trainer more "
                "GPUs.",
            ),
            (
                "offered",
                "Mean lag before the queue of all samples that entered the queue since the batch "
                "before, trained on or not.",
                "near `lag_before_queue_mean`",
                "Larger: the batch order or its bound prefers short responses.",
            ),
        )
    ),
    Metric(
        name="kept_groups",
        group="Staleness",
        unit="groups",
        meaning="Finished groups that are not in this batch.",
        healthy="below the number that eta admits",
        outside="At the bound for long: the trainer is slower than the engines; give it more of "
        "the machine, or use fewer engines.",
        source=_PIPELINE,
        written_by="train",
    ),
    Metric(
        name="interruptions",
        group="Staleness",
        unit="times",
        meaning="Number of interruptions of generation for new weights so far.",
        source=_PIPELINE,
        written_by="train",
    ),
    Metric(
        name="reference_kl_mean",
        group="Policy",
        unit="nats",
        meaning="Mean estimate (`actor.kl_estimator`) of the KL divergence from the reference "
        "model at a token.",
        healthy="rises from 0 and levels off",
        outside="It grows without bound: the policy leaves the reference. Raise "
        "`actor.kl_loss_coef` or lower `actor.optimizer.lr`. It stays at 0: the coefficient is so "
        "large that nothing is learned.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="reward_kl_mean",
        group="Policy",
        unit="nats",
        meaning="Mean KL estimate (`actor.kl_ctl_estimator`) of pi_behav from the reference at a "
        "token, as subtracted from the reward.",
        healthy="rises from 0 and levels off",
        outside="It grows without bound: raise `actor.kl_ctl`, or set `actor.kl_ctl_target`.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="reward_kl_of_response",
        group="Policy",
        unit="nats",
        meaning="KL estimate of `reward_kl_mean` summed over a response; compared with "
        "`actor.kl_ctl_target`.",
        healthy="near `actor.kl_ctl_target`, if that is set",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="kl_coefficient",
        group="Policy",
        unit="",
        meaning="`actor.kl_ctl` in this step; `actor.kl_ctl_target` adapts it.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="advantage_mean",
        group="Policy",
        unit="",
        meaning="Mean advantage, if advantages are per token (`gae`, `reinforce_plus_plus`).",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="teacher_kl_mean",
        group="Policy",
        unit="nats",
        meaning="Mean log pi_theta - log pi_teacher of a token, an estimate of the reverse KL.",
        healthy="falls towards 0",
        outside="It does not fall: the student cannot follow, or `teacher.distill_loss_weight` is "
        "small compared with `teacher.rl_loss_weight`.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="entropy",
        group="Policy",
        unit="nats",
        meaning="Mean entropy of the policy's next-token distribution.",
        healthy="> 10 % of its value at the start while the task is not solved",
        outside="Alarm `entropy`: exploration has stopped. Lower `actor.optimizer.lr`, raise "
        "`gconfig.temperature`, start over from an earlier checkpoint.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="drift",
        group="Policy",
        unit="nats",
        meaning="Mean |log pi_theta - log pi_behav|: distance of the policy from the sampling "
        "policy.",
        healthy="< 0.2",
        outside="Alarm `drift`: steps are too large for data of this age; lower "
        "`actor.optimizer.lr` or eta.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="drift_max",
        group="Policy",
        unit="nats",
        meaning="Largest |log pi_theta - log pi_behav| of a token.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="ratio_mean",
        group="Policy",
        unit="",
        meaning="Mean pi_theta / pi_anchor, with pi_prox (decoupled) or pi_behav as anchor. Its "
        "expectation under the anchor is 1.",
        healthy="0.9 to 1.1",
        outside="Alarm `ratio`: a few tokens became many times as likely; lower "
        "`actor.optimizer.lr`, `actor.eps_clip` or eta.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="behavior_weight_mean",
        group="Policy",
        unit="",
        meaning="Mean pi_prox / pi_behav after its cap; 1 without decoupling.",
        healthy="0.9 to 1.1",
        outside="Alarm `ratio`: data is too old for the size of the steps; lower eta or "
        "`actor.behav_imp_weight_cap`.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="behavior_weight_max",
        group="Policy",
        unit="",
        meaning="Largest pi_prox / pi_behav after its cap.",
        healthy="below `actor.behav_imp_weight_cap` in most steps",
        outside="At the cap in every step: some tokens are much likelier than when they were "
        "generated; see `drift`.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="effective_sample_size",
        group="Policy",
        unit="tokens",
        meaning="(sum w)^2 / sum w^2 of the weights pi_prox / pi_behav, in tokens.",
        healthy="> half of the tokens in the forward pass",
        outside="Few tokens determine the gradient: lower eta.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="weight_deviation",
        group="Policy",
        unit="",
        meaning="Mean |min(pi_prox / pi_behav, 2) - 1| of tokens, whatever the loss does with the "
        "weight.",
        healthy="< 0.03, and not rising",
        outside="Alarm `weight_deviation`: reached 0.05 22 to 41 updates before published "
        "collapses; lower eta or `actor.optimizer.lr`.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="effective_share",
        group="Policy",
        unit="share",
        meaning="Effective sample size of the weights pi_prox / pi_behav of tokens, without a cap, "
        "as a share of the tokens.",
        healthy="> 0.9",
        outside="Few tokens would determine an unbiased gradient: lower eta, or bound it by "
        "`rollout.bounded_drift.min_effective_share`.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="dropped_fraction",
        group="Policy",
        unit="share",
        meaning="Share of tokens that corrections of the loss dropped (weight 0).",
        healthy="< 0.1",
        outside="Much of the batch has no loss: a wider bound of the correction, or a lower eta.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="clip_fraction",
        group="Policy",
        unit="share",
        meaning="Share of tokens whose gradient the clip removed.",
        healthy="< 0.2",
        outside="Much of the batch has no gradient: lower `actor.optimizer.lr`, "
        "`actor.ppo_n_minibatches` or eta.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="sampler_gap_mean",
        group="Policy",
        unit="nats",
        meaning="Mean |log pi_trainer - log pi_engine| of tokens of lag 0, which both computed "
        "with the same weights. Missing if the batch has none.",
        healthy="< 0.05; below 1e-4 if both compute in float32",
        outside="Alarm `sampler_gap`: other dtypes, sampling that the trainer does not model, or "
        "other weights than reported.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="sampler_gap_max",
        group="Policy",
        unit="nats",
        meaning="Largest |log pi_trainer - log pi_engine| of a token of lag 0.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="sampler_gap_tokens",
        group="Policy",
        unit="tokens",
        meaning="Tokens of lag 0 in the forward pass, over which `sampler_gap_mean` is the mean.",
        source=_TOKENS,
    ),
    Metric(
        name="loss",
        group="Optimizer",
        unit="",
        meaning="Mean policy loss of the optimizer steps. It says little about progress.",
        healthy="finite",
        outside="A loss that is not finite ends the run; the error names the step.",
        source=_TRAINER,
    ),
    Metric(
        name="grad_norm",
        group="Optimizer",
        unit="",
        meaning="Largest global gradient norm of the optimizer steps, before clipping.",
        healthy="steady; peaks of ten times the usual value occur with stale data",
        outside="Rising for long: lower `actor.optimizer.lr`.",
        source=_TRAINER,
    ),
    Metric(
        name="lr",
        group="Optimizer",
        unit="",
        meaning="Learning rate of the last optimizer step.",
        source=_TRAINER,
    ),
    Metric(
        name="age_weight_mean",
        group="Optimizer",
        unit="",
        meaning="Mean weight of the samples by their age (`actor.age_half_life`).",
        healthy="near that of the mean lag, 2^(-`lag_token_mean` / `actor.age_half_life`)",
        outside="Near 0, steps are small: a longer half-life, or a lower eta.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="sequence_effective_share",
        group="Optimizer",
        unit="share",
        meaning="Effective sample size of the responses' weights (products of pi_prox / pi_behav) "
        "over their number; scales the learning rate (`actor.lr_ess_share`).",
        healthy="that of a run without staleness; it falls with the length of responses",
        outside="A few responses determine the gradient: lower eta.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="gradient_cosine",
        group="Optimizer",
        unit="",
        meaning="Cosine of the gradient to that of the optimizer step before it, mean over the "
        "batch (`actor.max_gradient_cosine`).",
        healthy="near 0",
        outside="Gradients of stale data repeat each other: lower eta or `actor.optimizer.lr`.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="aligned_steps",
        group="Optimizer",
        unit="steps",
        meaning="Optimizer steps of the batch that were projected or skipped "
        "(`actor.aligned_gradients`).",
        healthy="0 in most batches",
        outside="In every batch, `skip` stops training: raise `actor.max_gradient_cosine`.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="dual_variable",
        group="Optimizer",
        unit="",
        meaning="Multiplier of the constraint of the loss after the batch (`r2vpo`).",
        healthy="steady",
        outside="It grows without bound: the bound cannot be kept at this age; lower eta.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="optimizer_steps",
        group="Optimizer",
        unit="steps",
        meaning="Optimizer steps in the batch (`actor.ppo_n_minibatches`).",
        source=_TRAINER,
    ),
    Metric(
        name="critic_loss",
        group="Critic",
        unit="",
        meaning="Mean error of the values, half squared, clipped (`critic.eps_clip`).",
        healthy="falls, then is steady",
        outside="It grows: lower `critic.optimizer.lr`.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="critic_grad_norm",
        group="Critic",
        unit="",
        meaning="Largest norm of the critic's gradient, before clipping.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="critic_lr",
        group="Critic",
        unit="",
        meaning="Learning rate of the critic.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="value_mean",
        group="Critic",
        unit="reward",
        meaning="Mean value before a token, computed by the critic before the step.",
        healthy="near `return_mean`",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="return_mean",
        group="Critic",
        unit="reward",
        meaning="Mean return of a token: the target of its value.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="explained_variance",
        group="Critic",
        unit="",
        meaning="1 - variance of (return - value) / variance of the returns, with the values of "
        "the critic before the step.",
        healthy="0 to 1, rises",
        outside="Below 0 for long: the values are wrong. Raise `critic.optimizer.lr`, or use "
        "advantages of groups.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="value_clip_fraction",
        group="Critic",
        unit="",
        meaning="Share of tokens whose value is outside of its clip range.",
        healthy="< 0.2",
        outside="The critic moves far in one batch: raise `critic.eps_clip`, or lower "
        "`critic.optimizer.lr`.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="save_wait_s",
        group="Work",
        unit="s",
        meaning="Time since the previous step in which training waited for a checkpoint.",
        healthy="below a tenth of `step_s`",
        outside="Set `checkpoint.asynchronous=true`, or save less often (`save_every_steps`).",
        source=_PIPELINE,
        written_by="train",
    ),
    Metric(
        name="micro_batches",
        group="Work",
        unit="",
        meaning="Micro-batches of the batch, by `actor.max_tokens_per_mb`.",
        source=_TRAINER,
    ),
    Metric(
        name="packed_tokens",
        group="Work",
        unit="tokens",
        meaning="Tokens of all prefix trees, which the forward pass computes.",
        healthy="less than all tokens of prompts and responses of the batch",
        source=_TRAINER,
    ),
    Metric(
        name="generated_tokens",
        group="Work",
        unit="tokens",
        meaning="Tokens of all groups that have ended so far.",
        source=_PIPELINE,
        written_by="train",
    ),
    *(
        Metric(
            name=f"ledger_{count}_tokens",
            group="Work",
            unit="tokens",
            meaning=meaning,
            healthy=healthy,
            outside=outside,
            source=_PIPELINE,
        )
        for count, meaning, healthy, outside in (
            (
                "generated",
                "Generated tokens of groups that ended or were dropped so far, and lost ones: the "
                "sum of the four counts below.",
                "",
                "",
            ),
            ("trained", "Of these, given to the trainer, this batch included.", "", ""),
            (
                "waiting",
                "Of these, in groups that wait for training.",
                "at most eta batches",
                "See `kept_groups`.",
            ),
            (
                "dropped",
                "Of these, in groups that were dropped or filtered; `areal-lab trace RUN` shows "
                "the reasons.",
                "a small share",
                "A bound of the lag drops groups (raise `rollout.max_lag`, or wait), or dynamic "
                "sampling filters most of them.",
            ),
            (
                "generated_twice",
                "Of these, replaced by other tokens: their group started over, their weights are "
                "unknown, or their workflow raised.",
                "0 without lost engines",
                "See the incidents of `areal-lab trace RUN`.",
            ),
        )
    ),
    Metric(
        name="peak_rss_bytes",
        group="Work",
        unit="bytes",
        meaning="Largest resident memory of the trainer's process so far.",
        healthy="steady after the first steps",
        outside="Growing: longer responses; lower `actor.max_tokens_per_mb`.",
        source=_TRAINER,
        written_by="train",
    ),
    Metric(
        name="trainer_s",
        group="Work",
        unit="s",
        meaning="Time of the training step in the trainer: scores, packing, forward and backward "
        "passes, optimizer. Export of weights, checkpoints and waiting are not in it.",
        healthy="steady",
        outside="Growing: longer responses; `areal-lab trace RUN` shows the parts.",
        source=_TRAINER,
        written_by="train",
    ),
    Metric(
        name="trainer_tokens_per_s",
        group="Work",
        unit="tokens/s",
        meaning="`packed_tokens` per second of `trainer_s` and per trainer process (per GPU).",
        healthy="steady after the first steps",
        source=_TRAINER,
        written_by="train",
    ),
    Metric(
        name="trainer_tflop_per_s",
        group="Work",
        unit="TFLOP/s",
        meaning="1e12 floating-point operations of the models per second of `trainer_s` and per "
        "trainer process (per GPU). Every pass counts once: recomputed activations do not count "
        "again. Missing for a mixture of experts.",
        healthy="steady after the first steps",
        source=_TRAINER,
        written_by="train",
        always=False,
    ),
    Metric(
        name="mfu",
        group="Work",
        unit="share",
        meaning="Model FLOPs utilization: `trainer_tflop_per_s` divided by the GPU's peak of "
        "dense bf16 products. Missing on a CPU, and for a GPU that "
        "`areal_lab/config/data/gpus.toml` does not name.",
        healthy="0.3 to 0.5 for dense models of 1B parameters and more",
        outside="Low: small micro-batches (raise `actor.max_tokens_per_mb`), small batches, or "
        "recomputation. `actor.profile_steps` shows the kernels.",
        source=_TRAINER,
        written_by="train",
        always=False,
        on_gpu=True,
    ),
    Metric(
        name="gpu_peak_allocated_bytes",
        group="Work",
        unit="bytes",
        meaning="Largest memory of the trainer's tensors on a GPU in the step; of several "
        "processes, the largest.",
        healthy="steady after the first steps",
        outside="Near the GPU's memory: lower `actor.max_tokens_per_mb`, or set "
        "`actor.gradient_checkpointing=true`.",
        source=_TRAINER,
        written_by="train",
        always=False,
        on_gpu=True,
    ),
    Metric(
        name="gpu_peak_reserved_bytes",
        group="Work",
        unit="bytes",
        meaning="Same with the free blocks of torch's allocator.",
        healthy="little more than `gpu_peak_allocated_bytes`",
        outside="Far more: the allocator is fragmented.",
        source=_TRAINER,
        written_by="train",
        always=False,
        on_gpu=True,
    ),
)
OF_A_COMPONENT: Final = "reward_COMPONENT_mean"
"""Mean of each named component that a reward function returns, before its weight."""
ENVIRONMENT: Final = "environment/"
"""Prefix of the mean of each measurement of an environment of another library, by its name."""
OF_A_CUSTOM_LOSS: Final = "FIELD_mean"
"""Mean of each per-token field that a custom loss returns in addition to `loss`, by its name."""
