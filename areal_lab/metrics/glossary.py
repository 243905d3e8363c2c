"""Every metric of metrics.jsonl: unit, meaning, healthy range, what is wrong outside of it.

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
    """Empty for numbers without one."""
    meaning: str
    healthy: str = ""
    """Range; empty if every value is."""
    outside: str = ""
    """What a value outside means, and what to do."""
    source: str
    """The part of the run that measures it."""
    written_by: WrittenBy = "train and cosim"
    always: bool = True
    """Whether every line has it."""


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
        meaning="End of the step, since training began; of the simulated cluster in `cosim`.",
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
        meaning="Time since the step before ended, waiting included.",
        healthy="steady",
        outside="Growing: responses become longer, or engines were lost; `areal-lab trace RUN` "
        "says what each process waits for.",
        source=_PIPELINE,
    ),
    Metric(
        name="tokens_per_s",
        group="Progress",
        unit="tokens/s",
        meaning="Generated tokens of the groups that ended since the step before, over `step_s`.",
        healthy="steady",
        outside="Falling: engines wait (staleness bound, weights, a lost engine); "
        "`areal-lab watch RUN` shows for what.",
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
        outside="0: no difference to learn from, see `zero_advantage_samples`.",
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
        meaning="Samples with an advantage of 0, usually since all rewards of their group are "
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
        meaning="Mean of what `actor.overlong_share` takes off the rewards of long responses. "
        "`reward_mean` is without it.",
        healthy="near 0",
        outside="Falling: responses grow towards `gconfig.max_new_tokens`.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="held_out_reward",
        group="Rewards",
        unit="",
        meaning="Mean reward on held-out problems, of the weights after this step. Other "
        "measurements of a run are in held_out.jsonl.",
        healthy="rising, or steady at its best",
        outside="Alarm `reward_drop`: lower `actor.optimizer.lr` or eta, go back to a checkpoint.",
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
        meaning="Groups that ended since the step before and are not trained on: equal rewards "
        "under `rollout.dynamic_sampling`, or a reward function that failed.",
        healthy="fewer than `dataset.batch_size`",
        outside="Most of the generated tokens are thrown away: take harder or easier problems, "
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
        meaning="Mean number of the model's turns in a sample, all rows counted; of workflows with "
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
        outside="The agent rewrites its history, so that less of a prefix is shared; the counts of "
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
        meaning="Share of tool calls that failed, timed out, named no tool, could not be read, or "
        "came in the last turn.",
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
        meaning="Share of tool calls that could not be read: no JSON, or a fence that is not "
        "closed. The model got an error as their result.",
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
        meaning="Responses without a loss, since they were cut off (`actor.mask_truncated`).",
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
    Metric(
        name="kept_groups",
        group="Staleness",
        unit="groups",
        meaning="Groups that were ready and not in this batch.",
        healthy="below what eta admits",
        outside="At the bound for long: the trainer is slower than the engines; give it more of "
        "the machine, or take fewer engines.",
        source=_PIPELINE,
        written_by="train",
    ),
    Metric(
        name="interruptions",
        group="Staleness",
        unit="times",
        meaning="Times so far that generation was interrupted for new weights.",
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
        "token, as it is charged in the reward.",
        healthy="rises from 0 and levels off",
        outside="It grows without bound: raise `actor.kl_ctl`, or set `actor.kl_ctl_target`.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="reward_kl_of_response",
        group="Policy",
        unit="nats",
        meaning="The same summed over a response: what `actor.kl_ctl_target` is compared with.",
        healthy="near `actor.kl_ctl_target`, if that is set",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="kl_coefficient",
        group="Policy",
        unit="",
        meaning="`actor.kl_ctl` in this step, which a target adapts.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="advantage_mean",
        group="Policy",
        unit="",
        meaning="Mean advantage, where tokens have their own (`gae`, `reinforce_plus_plus`).",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="teacher_kl_mean",
        group="Policy",
        unit="nats",
        meaning="Mean log pi_theta - log pi_teacher of a token, an estimate of the reverse KL.",
        healthy="falls towards 0",
        outside="It stays: the student cannot follow, or `teacher.distill_loss_weight` is small "
        "beside `teacher.rl_loss_weight`.",
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
        meaning="Mean |log pi_theta - log pi_behav|: how far the policy moved since its data.",
        healthy="< 0.2",
        outside="Alarm `drift`: steps too large for data of this age; lower "
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
        outside="Alarm `ratio`: data too old for the steps; lower eta or "
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
        meaning="(sum w)^2 / sum w^2 of the weights pi_prox / pi_behav: tokens that count.",
        healthy="> half of the tokens in the forward pass",
        outside="Few tokens make the gradient: lower eta.",
        source=_TOKENS,
        always=False,
    ),
    Metric(
        name="clip_fraction",
        group="Policy",
        unit="share",
        meaning="Share of tokens whose gradient the clip removed.",
        healthy="< 0.2",
        outside="Much of the batch is generated in vain: lower `actor.optimizer.lr`, "
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
        outside="Alarm `sampler_gap`: other types, sampling the trainer does not model, or other "
        "weights than told.",
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
        meaning="Tokens of lag 0 in the forward pass: those behind `sampler_gap_mean`.",
        source=_TOKENS,
    ),
    Metric(
        name="loss",
        group="Optimizer",
        unit="",
        meaning="Mean policy loss of the optimizer steps. It says little about progress.",
        healthy="finite",
        outside="A loss that is not finite ends the run, naming the step.",
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
        healthy="falls, then stays",
        outside="It grows: lower `critic.optimizer.lr`.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="critic_grad_norm",
        group="Critic",
        unit="",
        meaning="Largest norm of the critic's gradient before it was clipped.",
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
        meaning="Mean value before a token, by the critic before the step.",
        healthy="near `return_mean`",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="return_mean",
        group="Critic",
        unit="reward",
        meaning="Mean return of a token: what its value should have been.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="explained_variance",
        group="Critic",
        unit="",
        meaning="1 - variance of (return - value) / variance of the returns: what the critic knew "
        "before it saw them.",
        healthy="0 to 1, rises",
        outside="Below 0 for long: the values mislead. Raise `critic.optimizer.lr`, or take "
        "advantages of groups.",
        source=_TRAINER,
        always=False,
    ),
    Metric(
        name="value_clip_fraction",
        group="Critic",
        unit="",
        meaning="Share of tokens whose value had left its clip range.",
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
        meaning="Time since the step before that training waited for a checkpoint.",
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
        meaning="Tokens of all prefix trees: those that the forward pass computes.",
        healthy="below prompts and responses of the batch together",
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
)
OF_A_COMPONENT: Final = "reward_COMPONENT_mean"
"""The mean of each named component that a reward function returns, before its weight."""
OF_A_CUSTOM_LOSS: Final = "FIELD_mean"
"""The mean of each per-token field that a custom loss returns besides `loss`, by its name."""
