"""What the trainer process is given, as JSON: the run's settings and what is known at its start."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_lab.config.schema import ActorConfig, OptimizerConfig, TrainConfig
from areal_lab.control.events import Version
from areal_lab.host.claim import Claim


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
    fields_folder: str = ""
    """Where to write the training fields of tokens (`runlog.tokens.fields`); empty: nowhere."""
    run_folder: str = ""
    """Folder that checkpoints and token fields are written into while it is the run's; empty: no
    claim is checked."""
    run_key: str = ""
    """Of the run's claim to it."""
    device: str = "cpu"
    """`cpu` or `cuda`, which is the only GPU that the process sees."""
    engine_device: str = "cpu"
    """Where the engines compute, which decides the type of the weights that they get."""
    ranks: int = 1
    """Processes that train together."""
    tensor: int = 1
    """Of them, those that divide each layer."""
    context: int = 1
    """Of them, those that divide each sequence."""
    rendezvous: str = ""
    """Where they meet (`RankPlace.rendezvous`); empty: in a file of the weights folder."""
    gpus: str = ""
    """GPU of each process with `cuda`, as in `CUDA_VISIBLE_DEVICES`."""
    takes_turns: bool = False
    """Whether engines have the same devices, which are left to them except from a training step to
    the export of its weights."""
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
        """Of the run to its folder."""
        return Claim(Path(self.run_folder), self.run_key) if self.run_folder else None

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.total_train_steps * self.actor.ppo_n_minibatches

    @property
    def load_device(self) -> str:
        """Where models are loaded. Sharding moves them to the device layer by layer: one that is
        shared need not fit into a single GPU."""
        return "cpu" if self.ranks > 1 else self.device

    @property
    def temperature(self) -> float:
        """The sampler's temperature; for greedy samples (0), log-probs are computed at 1."""
        return self.config.gconfig.temperature or 1.0

    @property
    def kept_versions(self) -> int:
        """Versions kept in memory for engines, where weights are not in a folder: a restarted
        engine needs the version that the others hold, even if there is a newer one."""
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
