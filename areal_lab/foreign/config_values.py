"""Settings of a run from the configuration that its framework printed or saved.

Only numbers, the model's last path component and the engine's name are kept: configurations of
others have paths, hosts and API keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from areal_lab.foreign.quantities import known, tidy
from areal_lab.foreign.record import Quantity

_MODEL: Final = re.compile(r"[\w.+-]{1,80}")

HYDRA: Final[Mapping[str, Sequence[str]]] = {
    "model": (
        "actor_rollout_ref/model/path",
        "model_name_or_path",
        "_name_or_path",
        "policy/model_name",
        "trainer/policy/model/path",
        "model/name",
    ),
    "prompts_per_step": ("data/train_batch_size", "grpo/num_prompts_per_step", "groups_per_batch"),
    "samples_per_prompt": (
        "actor_rollout_ref/rollout/n",
        "num_generations",
        "grpo/num_generations_per_prompt",
        "generator/n_samples_per_prompt",
        "group_size",
    ),
    "max_response": ("data/max_response_length", "max_completion_length", "max_tokens"),
    "engine": ("actor_rollout_ref/rollout/name",),
    "engine_tp": (
        "actor_rollout_ref/rollout/tensor_model_parallel_size",
        "vllm_tensor_parallel_size",
    ),
    "minibatch": ("actor_rollout_ref/actor/ppo_mini_batch_size",),
}
"""Paths of settings in the configurations of verl, TRL, NeMo-RL, SkyRL and tinker-cookbook."""
_TEXTS: Final = ("model", "engine")


def settings_of(config: Mapping[str, Any]) -> dict[str, Quantity]:
    """Settings of a run from a configuration with keys joined by `/`."""
    found: dict[str, Quantity] = {}
    for name, paths in HYDRA.items():
        raw = next((config[path] for path in paths if config.get(path) is not None), None)
        if raw is None:
            continue
        if name in _TEXTS:
            if isinstance(raw, str) and (text := short_name(raw)):
                found[name] = text
        elif (value := known(raw)) is not None:
            found[name] = tidy(value)
    nodes, each = known(config.get("trainer/nnodes")), known(config.get("trainer/n_gpus_per_node"))
    if nodes and each:
        pool = (known(config.get("rollout/nnodes")) or 0) * (
            known(config.get("rollout/n_gpus_per_node")) or 0
        )
        if pool:
            found |= {"trainer_gpus": tidy(nodes * each), "rollout_gpus": tidy(pool)}
        found["gpus"] = tidy(nodes * each + pool)
    mini, batch = found.pop("minibatch", None), found.get("prompts_per_step")
    if isinstance(mini, int) and isinstance(batch, int) and mini > 0 and batch % mini == 0:
        found["minibatches"] = batch // mini
    return found


def short_name(path: str) -> str:
    """Last component of a model path or hub name; empty if it is no name."""
    last = path.rstrip("/").rsplit("/", 1)[-1]
    return last if _MODEL.fullmatch(last) is not None else ""
