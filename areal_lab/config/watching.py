"""Settings of watching a run: alarms on its metrics, and sinks that get them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Gt, Le
from pydantic import AllowInfNan, Field

from areal_lab.config.record import About, NonNegative, Positive, Record, Share
from areal_lab.metrics.alarm import AlarmName

SinkName: TypeAlias = Literal["tensorboard", "wandb", "swanlab", "trackio"]


class AlarmsConfig(Record):
    """Alarms on the metrics of a run; they never change or end it."""

    off: list[AlarmName] = Field(default_factory=list[AlarmName])
    """Alarms that are never raised."""
    steps: Annotated[int, Ge(1), About(unit="steps")] = 5
    """Training steps in a row beyond a bound that raise an alarm, and within it that end it."""
    ratio: Positive = 0.1
    """Largest distance of `ratio_mean` and `behavior_weight_mean` from 1."""
    drift: Annotated[float, Gt(0), About(unit="nats")] = 0.2
    """Largest `drift`. `reproductions.learning.where_staleness_hurts` tells what lies above it."""
    entropy: Share = 0.1
    """Smallest `entropy`, as a share of its mean over the first 5 steps."""
    truncated: Share = 0.5
    """Largest `truncated_share`."""
    lag: Annotated[NonNegative, About(unit="versions")] = 0.0
    """Largest `lag_token_mean`. 0 takes eta + 1, or 16 if eta is inf."""
    sampler_gap: Annotated[float, Gt(0), About(unit="nats")] = 0.05
    """Largest `sampler_gap_mean`."""
    equal_rewards: Share = 0.9
    """Largest share of samples with an advantage of 0."""
    reward_drop: Annotated[float, Ge(0), Le(1)] = 0.12
    """Largest loss of reward, as a share of its best: of 3 held-out measurements, or of 20 training
    steps if there are none."""
    solved: Annotated[float, AllowInfNan(False)] = 0.9
    """Mean reward from which the task counts as solved: equal rewards, low entropy and responses at
    the limit are then no alarm."""


class TensorBoardConfig(Record):
    """TensorBoard (`pip install tensorboard`)."""

    path: str = ""
    """Folder of the event files; empty takes `tensorboard/` in the run folder."""


class WandbConfig(Record):
    """Weights & Biases (`pip install wandb`)."""

    mode: Literal["offline", "online"] = "offline"
    """`offline` writes files for `wandb sync`; `online` sends everything as it comes."""
    project: str = "areal_lab"
    """Project of the run."""
    entity: str = ""
    """User or team; empty takes that of the login."""
    group: str = ""
    """Group of runs."""
    name: str = ""
    """Name of the run; empty takes that of the run folder."""
    tags: list[str] = Field(default_factory=list[str])
    """Tags of the run."""
    dir: str = ""
    """Folder of its files; empty takes the run folder."""


class SwanLabConfig(Record):
    """SwanLab (`pip install swanlab`)."""

    mode: Literal["offline", "online"] = "offline"
    """`offline` writes files for `swanlab sync`; `online` sends everything as it comes."""
    project: str = "areal_lab"
    """Project of the run."""
    workspace: str = ""
    """User or organization; empty takes that of the login."""
    group: str = ""
    """Group of runs."""
    name: str = ""
    """Name of the run; empty takes that of the run folder."""
    tags: list[str] = Field(default_factory=list[str])
    """Tags of the run."""
    logdir: str = ""
    """Folder of its files; empty takes `swanlab/` in the run folder."""


class TrackioConfig(Record):
    """Trackio (`pip install trackio`)."""

    project: str = "areal_lab"
    """Project of the run."""
    group: str = ""
    """Group of runs."""
    name: str = ""
    """Name of the run; empty takes that of the run folder."""
    space_id: str = ""
    """Hugging Face Space to send to; empty keeps everything on this machine."""
    dir: str = ""
    """Folder of its database; empty takes `trackio/` in the run folder."""


class StatsLoggerConfig(Record):
    """Options of sinks, named as these tools name them."""

    close_timeout_s: Annotated[Positive, About(hint="sinks need a few seconds to close")] = 20.0
    """Longest time that the end of a run waits for its sinks; what is not sent by then is counted
    in summary.json."""
    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    swanlab: SwanLabConfig = Field(default_factory=SwanLabConfig)
    trackio: TrackioConfig = Field(default_factory=TrackioConfig)
