"""Settings that the remedies of alarms name, as other frameworks call them.

Only names that stand in the source of the framework (its settings or examples, snapshots of 2026-05
to 2026-08): where one has no setting of the same meaning, our name stays. docs/from_areal.md has
the same table, and a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

SETTING_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "verl": {
        "actor.optimizer.lr": "actor_rollout_ref.actor.optim.lr",
        "actor.eps_clip": "actor_rollout_ref.actor.clip_ratio",
        "actor.behav_imp_weight_cap": "algorithm.rollout_correction.rollout_is_threshold",
        "gconfig.max_new_tokens": "data.max_response_length",
        "gconfig.n_samples": "actor_rollout_ref.rollout.n",
        "gconfig.temperature": "actor_rollout_ref.rollout.temperature",
        "top_p": "actor_rollout_ref.rollout.top_p",
        "top_k": "actor_rollout_ref.rollout.top_k",
        "reward.fn": "custom_reward_function.path",
    },
    "trl": {
        "actor.optimizer.lr": "learning_rate",
        "actor.eps_clip": "epsilon",
        "actor.behav_imp_weight_cap": "vllm_importance_sampling_cap",
        "gconfig.max_new_tokens": "max_completion_length",
        "gconfig.n_samples": "num_generations",
        "gconfig.temperature": "temperature",
        "reward.fn": "reward_funcs",
    },
    "slime": {
        "actor.optimizer.lr": "--lr",
        "actor.eps_clip": "--eps-clip",
        "actor.behav_imp_weight_cap": "--tis-clip",
        "gconfig.max_new_tokens": "--rollout-max-response-len",
        "gconfig.n_samples": "--n-samples-per-prompt",
        "gconfig.temperature": "--rollout-temperature",
        "gconfig.stop": "--rollout-stop",
        "top_p": "--rollout-top-p",
        "top_k": "--rollout-top-k",
        "reward.fn": "--custom-rm-path",
    },
    "miles": {
        "actor.optimizer.lr": "--lr",
        "actor.eps_clip": "--eps-clip",
        "actor.behav_imp_weight_cap": "--tis-clip",
        "eta": "--max-weight-staleness",
        "gconfig.max_new_tokens": "--rollout-max-response-len",
        "gconfig.n_samples": "--n-samples-per-prompt",
        "gconfig.temperature": "--rollout-temperature",
        "gconfig.stop": "--rollout-stop",
        "top_p": "--rollout-top-p",
        "top_k": "--rollout-top-k",
        "reward.fn": "--custom-rm-path",
    },
    "prime-rl": {
        "actor.optimizer.lr": "trainer.optim.lr",
        "eta": "orchestrator.max_off_policy_steps",
        "gconfig.max_new_tokens": "orchestrator.train.sampling.max_completion_tokens",
        "gconfig.n_samples": "orchestrator.group_size",
        "gconfig.temperature": "orchestrator.train.sampling.temperature",
    },
    "nemo-rl": {
        "actor.optimizer.lr": "policy.optimizer.kwargs.lr",
        "actor.eps_clip": "loss_fn.ratio_clip_max",
        "actor.behav_imp_weight_cap": "loss_fn.truncated_importance_sampling_ratio",
        "eta": "grpo.async_grpo.max_trajectory_age_steps",
        "gconfig.max_new_tokens": "policy.generation.max_new_tokens",
        "gconfig.n_samples": "grpo.num_generations_per_prompt",
        "gconfig.temperature": "policy.generation.temperature",
        "gconfig.stop": "policy.generation.stop_strings",
        "top_p": "policy.generation.top_p",
        "top_k": "policy.generation.top_k",
    },
    "openrlhf": {
        "actor.optimizer.lr": "--actor.adam.lr",
        "actor.eps_clip": "--actor.eps_clip",
        "actor.behav_imp_weight_cap": "--algo.advantage.is_correction_threshold",
        "gconfig.max_new_tokens": "--rollout.max_new_tokens",
        "gconfig.n_samples": "--rollout.n_samples_per_prompt",
        "gconfig.temperature": "--rollout.temperature",
        "top_p": "--rollout.top_p",
        "reward.fn": "--reward.remote_url",
    },
    "skyrl": {
        "actor.optimizer.lr": "trainer.policy.optimizer_config.lr",
        "actor.eps_clip": "trainer.algorithm.eps_clip_high",
        "actor.behav_imp_weight_cap": (
            "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high"
        ),
        "eta": "trainer.fully_async.max_staleness_steps",
        "gconfig.max_new_tokens": "generator.sampling_params.max_generate_length",
        "gconfig.n_samples": "generator.n_samples_per_prompt",
        "gconfig.temperature": "generator.sampling_params.temperature",
        "gconfig.stop": "generator.sampling_params.stop",
        "top_p": "generator.sampling_params.top_p",
        "top_k": "generator.sampling_params.top_k",
    },
    "areal": {
        "eta": "rollout.max_head_offpolicyness",
        "top_p": "gconfig.top_p",
        "top_k": "gconfig.top_k",
        "reward.fn": "reward_fn",
    },
    "roll": {
        "actor.optimizer.lr": "actor_train.training_args.learning_rate",
        "actor.eps_clip": "pg_clip",
        "gconfig.max_new_tokens": "actor_infer.generating_args.max_new_tokens",
        "gconfig.n_samples": "num_return_sequences_in_group",
        "gconfig.temperature": "actor_infer.generating_args.temperature",
        "gconfig.stop": "actor_infer.generating_args.stop_strings",
        "top_p": "actor_infer.generating_args.top_p",
        "top_k": "actor_infer.generating_args.top_k",
    },
}
"""Name there by name here, by framework. AReaL has most of our names."""

_SAME: Final[Mapping[str, str]] = {"unsloth": "trl"}
"""Frameworks whose settings are those of another."""


def translated(text: str, framework: str | None) -> str:
    """Replace our names in a remedy by those of a framework, where it has them."""
    names = SETTING_NAMES.get(_SAME.get(framework or "", framework or ""), {})
    if not names:
        return text
    ours = sorted(map(re.escape, names), key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(ours)})(?!\w|\.\w)")
    return pattern.sub(lambda found: names[found[0]], text)
