"""Settings of the trainer process, as JSON: the run's settings and facts known at its start."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal_lab.config.schema import ActorConfig, OptimizerConfig, TrainConfig
from areal_lab.control.events import Version
from areal_lab.host.claim import Claim

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The settings of the trainer process."""

    config: TrainConfig
    model_path: str
    """A Hugging Face folder (`resolve_model_path` has been called)."""
    weights_root: str
    """Folder for exported weights, preferably in memory."""
    threads: int = 1
    loss_file: str = ""
    """File with a pickled custom loss; takes precedence over `config.actor.loss_fn`."""
    advantage_file: str = ""
    """The same of advantages and `config.actor.advantage_fn`."""
    fields_folder: str = ""
    """Folder for the training fields of tokens (`runlog.token_columns`); empty disables them."""
    run_folder: str = ""
    """Folder that checkpoints and token fields are written into while it is the run's; empty: no
    claim is checked."""
    run_key: str = ""
    """Key of the run's claim to its folder."""
    device: str = "cpu"
    """`cpu` or `cuda`, which is the only GPU that the process sees."""
    engine_device: str = "cpu"
    """Device of the engines, which decides the type of their weights."""
    ranks: int = 1
    """Processes that train together."""
    tensor: int = 1
    """Number of ranks that divide each layer."""
    context: int = 1
    """Number of ranks that divide each sequence."""
    rendezvous: str = ""
    """Meeting point of the ranks (`RankPlace.rendezvous`); empty: a file of the weights folder."""
    gpus: str = ""
    """GPU of each process with `cuda`, as in `CUDA_VISIBLE_DEVICES`."""
    takes_turns: bool = False
    """True if engines use the same devices, which the trainer uses only from a training step to the
    export of its weights."""
    gpu_memory_fraction: float = 1.0
    """Part of the GPU's memory that each process may allocate; below 1 if an engine shares it."""
    first_version: Version = 0
    """Version of the first weights; positive for a run that continues."""
    state_folder: str = ""
    """Saved state to continue from (`training.checkpoint`); empty: from the model folder."""

    @property
    def actor(self) -> ActorConfig:
        """The settings of training."""
        return self.config.actor

    @property
    def claim(self) -> Claim | None:
        """Claim of the run to its folder."""
        return Claim(Path(self.run_folder), self.run_key) if self.run_folder else None

    @property
    def param_dtype(self) -> torch.dtype:
        """Type of the weights that layers compute with."""
        import torch  # a late import: the pipeline's process has no torch

        return torch.bfloat16 if self.actor.param_dtype == "bfloat16" else torch.float32

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.total_train_steps * self.actor.ppo_n_minibatches

    @property
    def sharded(self) -> bool:
        """True if layers are gathered when they compute: from several ranks, from main memory, or
        in another type. A single rank then has a process group too.
        """
        actor = self.actor
        return self.ranks > 1 or actor.offload or actor.param_dtype != "float32"

    @property
    def load_device(self) -> str:
        """Device on which models are loaded. Sharding moves them to the device layer by layer, so a
        sharded model need not fit into a single GPU.
        """
        return "cpu" if self.sharded else self.device

    @property
    def temperature(self) -> float:
        """The sampler's temperature; for greedy samples (0), log-probs are computed at 1."""
        return self.config.gconfig.temperature or 1.0

    @property
    def kept_versions(self) -> int:
        """Versions kept in memory for engines, unless weights are in a folder: a restarted engine
        needs the version of the others, even if a newer one exists.
        """
        return 1 + (self.config.rollout.max_engine_restarts > 0)

    def to_json(self) -> str:
        """One line of JSON; infinity is written as `Infinity`."""
        return json.dumps({**asdict(self), "config": self.config.model_dump()})

    @staticmethod
    def from_json(text: str) -> TrainerSettings:
        """Inverse of `to_json`."""
        fields = json.loads(text)
        return TrainerSettings(**{**fields, "config": TrainConfig(**fields["config"])})


def lr_factor(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Factor on the learning rate at an optimizer step.

    Rises linearly to 1 in `warmup_steps`; after that it is constant, or decays so that it would
    reach `min_lr_ratio` at the step after the last one.
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
