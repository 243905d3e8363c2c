"""Settings of the trainer process: a plain record, passed to it as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from areal_lab.config.schema import OptimizerConfig, TrainConfig
from areal_lab.control.events import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The settings of the trainer process."""

    model_path: str
    """A Hugging Face folder (`resolve_model_path` has been called)."""
    weights_root: str
    """Folder for exported weights, preferably in memory."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    optimizer_steps: int = 0
    """Optimizer steps of the whole run, for a learning-rate schedule that decays until its end."""
    clip_epsilon: float = 0.2
    decoupled: bool = True
    """Decoupled PPO; false is standard PPO anchored at the behavior policy."""
    behavior_weight_cap: float = 5.0
    loss_fn: str = ""
    """Import path of a custom loss; empty uses PPO with the fields above."""
    loss_file: str = ""
    """File with a pickled custom loss; takes precedence over `loss_fn`."""
    advantage_fn: str = ""
    """Import path of a custom advantage function; empty uses group advantages."""
    normalize_std: bool = True
    minibatches: int = 1
    max_tokens_per_microbatch: int = 4096
    compute_dtype: str = "auto"
    export_dtype: str = "auto"
    """Type of the exported weights; the engines' compute type."""
    transfer: str = "folder"
    """How weights reach the engines: `engines.weights.records.Transfer`."""
    transfer_timeout_s: float = 30.0
    kept_versions: int = 1
    """Versions kept in memory for engines, where weights are not in a folder."""
    temperature: float = 1.0
    """The sampler's temperature; for greedy samples (0), log-probs are computed at 1."""
    threads: int = 1
    seed: int = 1
    device: str = "cpu"
    gradient_checkpointing: bool = False
    lora_rank: int = 0
    """Rank of the adapters that are trained on frozen weights; 0 trains the weights themselves."""
    lora_alpha: int = 16
    target_modules: tuple[str, ...] = ("all-linear",)
    """Layers with an adapter, as arguments of `lora.target_modules`."""
    first_version: Version = 0

    def __post_init__(self) -> None:
        if self.minibatches < 1 or self.max_tokens_per_microbatch < 1 or self.threads < 1:
            raise ValueError(
                "minibatches, max_tokens_per_microbatch and threads must be >= 1, but are "
                f"{self.minibatches}, {self.max_tokens_per_microbatch} and {self.threads}"
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}, but must be > 0 in training")
        if self.optimizer.lr_scheduler_type != "constant" and self.optimizer_steps < 1:
            raise ValueError(
                f"optimizer_steps is {self.optimizer_steps}, but must be >= 1 for "
                f"lr_scheduler_type {self.optimizer.lr_scheduler_type!r}"
            )

    def to_json(self) -> str:
        """One line of JSON; infinity is written as `Infinity`."""
        return json.dumps({**asdict(self), "optimizer": self.optimizer.model_dump()})

    @staticmethod
    def from_json(text: str) -> TrainerSettings:
        """Inverse of `to_json`."""
        fields = json.loads(text)
        typed = {
            "optimizer": OptimizerConfig(**fields["optimizer"]),
            "target_modules": tuple(fields["target_modules"]),
        }
        return TrainerSettings(**{**fields, **typed})


def settings_from_config(
    config: TrainConfig,
    *,
    model_path: Path,
    threads: int,
    weights_root: Path,
    loss_file: Path | None = None,
    device: str = "cpu",
) -> TrainerSettings:
    """The trainer's settings from a run's configuration.

    Args:
        config: the run.
        model_path: folder that `resolve_model_path(config.actor.path)` returned.
        threads: CPU threads, if the configuration does not set them.
        weights_root: folder for exported weights.
        loss_file: a pickled custom loss; None uses the loss of `config.actor`.
        device: a torch device.
    """
    actor = config.actor
    return TrainerSettings(
        model_path=str(model_path),
        weights_root=str(weights_root),
        optimizer=actor.optimizer.model_copy(),
        optimizer_steps=config.total_train_steps * actor.ppo_n_minibatches,
        clip_epsilon=actor.eps_clip,
        decoupled=actor.use_decoupled_loss,
        behavior_weight_cap=actor.behav_imp_weight_cap,
        loss_fn=actor.loss_fn,
        loss_file=str(loss_file or ""),
        advantage_fn=actor.advantage_fn,
        normalize_std=actor.adv_norm_std,
        minibatches=actor.ppo_n_minibatches,
        max_tokens_per_microbatch=actor.max_tokens_per_mb,
        compute_dtype=actor.dtype,
        export_dtype=config.rollout.dtype,
        transfer=config.rollout.transfer,
        transfer_timeout_s=config.rollout.transfer_timeout_s,
        # A restarted engine needs the version that the others hold, even if there is a newer one.
        kept_versions=1 + (config.rollout.max_engine_restarts > 0),
        temperature=config.gconfig.temperature or 1.0,
        threads=actor.threads or threads,
        seed=config.seed,
        device=device,
        gradient_checkpointing=actor.gradient_checkpointing,
        lora_rank=actor.lora_rank if actor.use_lora else 0,
        lora_alpha=actor.lora_alpha,
        target_modules=tuple(actor.target_modules),
    )


def lr_factor(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Factor on the learning rate at an optimizer step.

    Rises linearly to 1 in `warmup_steps`; after that it is constant, or decays so that it would
    reach `min_lr_ratio` at the step after the last one.

    Args:
        step: optimizer steps done so far.
        optimizer: names the schedule and its minimum.
        total_steps: optimizer steps of the whole run.
    """
    if step < optimizer.warmup_steps:
        return (step + 1) / optimizer.warmup_steps
    falling = max(1, total_steps - optimizer.warmup_steps)
    done = min(1.0, (step - optimizer.warmup_steps) / falling)
    left = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": (1.0 + math.cos(math.pi * done)) / 2.0,
    }[optimizer.lr_scheduler_type]
    return optimizer.min_lr_ratio + (1.0 - optimizer.min_lr_ratio) * left
