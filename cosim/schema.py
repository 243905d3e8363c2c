"""Every setting of a co-simulated run: those of a training run, and the simulated cluster's.

A training run's file is one of a co-simulated run, too. Its settings of processes (engines, ports,
threads of engines, weight transfer, reward workers) have no effect; `rollout` has the schedule.
"""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field

from areal_lab.config.record import About, NonNegative, Record, Whole
from areal_lab.config.schema import TrainConfig


class ClusterConfig(Record):
    """The simulated cluster."""

    preset: str = "table_1_1.5b_asynchronous"
    """A preset of `areal-lab simulate --list-presets`, or a YAML file of its settings. Its schedule
    and the sizes of its batch have no effect: `rollout`, `dataset.batch_size`, `gconfig.n_samples`
    and `actor.ppo_n_minibatches` take their place."""
    settings: list[str] = Field(default_factory=list)
    """Changes of the preset, as `weights.backend=nccl`."""
    scale: NonNegative = 0.0
    """Factor on the numbers of GPUs. 0 takes the run's responses per batch over the preset's, so
    that a GPU has as much to do as in the preset."""
    seed: Whole = 1
    """Seed of the simulated lengths, latencies and failures. The schedule along a log depends on
    it, and not on the run's `seed`."""


class CosimConfig(TrainConfig):
    """A co-simulated run: a training run whose times are those of a simulated cluster."""

    mode: Literal["along", "live"] = "along"
    """`along`: a log says who learns from what under which version, so that the schedule is the
    same for every objective and seed. `live`: lengths come from the model, and decide with the
    cluster's costs how old its tokens are."""
    log: str = ""
    """Run folder or events.jsonl to follow (`mode=along`); empty simulates `simulator.preset`."""
    objective: Literal["decoupled", "naive"] | None = None
    """Short for `actor.use_decoupled_loss`: `decoupled` or `naive` PPO; null leaves it as it is."""
    tokens_per_token: Annotated[int, Ge(0), About(unit="tokens")] = 0
    """Simulated tokens that one token of the model stands for. 0 takes the mean response of the
    cluster over the model's (`mode=live`), or shares of a response's length (`mode=along`)."""
    eval_every_steps: Whole = 5
    """Steps between two measurements of the newest weights on held-out problems. The first and
    last version are always measured; 0 measures these alone."""
    simulator: ClusterConfig = Field(default_factory=ClusterConfig)
