"""Sections of settings that several kinds of runs share: checkpoints, hosts, sampling, scaling,
alarms and sinks.

Bounds of sampling, and settings of dynamic sampling, which replaces groups of equal rewards.

The same bounds apply to settings, requests of agents and requests to engines.
"""

from __future__ import annotations

import math
from reprlib import Repr
from typing import Annotated, Any, Final, Literal, TypeAlias

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    AllowInfNan,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from areal_lab.config.record import About, Count, NonNegative, Positive, Record, Share, Whole
from areal_lab.control.drift import DriftBound
from areal_lab.control.scaling import ScalingRule
from areal_lab.control.schedule import MAX_DRIFT
from areal_lab.metrics.alarm import AlarmName

LEAST_TEMPERATURE: Final = 1e-5
"""Smallest temperature above 0. Engines compute in float32, in which logits divided by less may be
infinite; vLLM and SGLang sample greedily at less than this."""
MOST_TEMPERATURE: Final = 1e5
LEAST_TOP_P: Final = 2.0**-126
"""Smallest number that float32 has without loss of precision (1.2e-38)."""
MOST_INT32: Final = 2**31 - 1
"""Largest integer that engines can store."""
_SHOWN: Final = 60
"""Characters of a wrong value in an error."""


def check_temperature(value: float) -> float:
    """Return the temperature if engines can sample at it."""
    if not (value == 0 or LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE):
        raise ValueError(
            f"temperature is {shown(value)}, but must be 0 (greedy) or from "
            f"{LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}"
        )
    return value


def check_top_p(value: float) -> float:
    """Return the share of probability if engines can sample with it."""
    if not LEAST_TOP_P <= value <= 1:
        raise ValueError(
            f"top_p is {shown(value)}, but must be in (0, 1], and at least {LEAST_TOP_P:.2g}: "
            "engines compute in float32"
        )
    return value


def shown(value: object) -> str:
    """Format a value for an error: on one line, and cut."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python does not write them
        text = "an integer of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


_SHORT: Final = Repr()
_SHORT.maxother = _SHORT.maxstring = _SHORT.maxlong = _SHOWN

_FLOAT32: Final = "engines compute in float32"
Temperature = Annotated[
    NonNegative,
    Le(MOST_TEMPERATURE),
    AfterValidator(check_temperature),
    About(hint=f"0 is greedy, and others are at least {LEAST_TEMPERATURE:g}: {_FLOAT32}"),
]
TopP = Annotated[
    float,
    Gt(0),
    Le(1),
    AfterValidator(check_top_p),
    About(hint=f"at least {LEAST_TOP_P:.2g}: {_FLOAT32}"),
]


_TRUTH: Final = TypeAdapter(bool)


class ReadsDropLate(Record):
    """Settings with `on_late`, which older versions called `drop_late`: true or false."""

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, values: Any) -> Any:
        if isinstance(values, dict) and "drop_late" in values:
            values = {**values, "on_late": values["drop_late"]}
            del values["drop_late"]
        return values

    @field_validator("on_late", mode="before", check_fields=False)
    @classmethod
    def _from_truth(cls, value: Any) -> Any:
        try:
            return "drop" if _TRUTH.validate_python(value) else "wait"
        except ValidationError:
            return value


class DynamicSamplingConfig(Record):
    """Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11): batches of groups with a gradient only."""

    enabled: bool = False
    """Replace groups whose rewards are all equal with groups of further prompts, and count them as
    filtered. Such groups have no gradient, unless advantages compare them with the batch
    (REINFORCE++)."""
    tolerance: NonNegative = 0.0
    """Largest difference of two rewards that counts as equal, for the rewards of `reward.fn` before
    the overlong penalty."""
    max_batches: Annotated[int, Ge(1), About(unit="batches")] = 10
    """Maximum number of filtered groups per training batch, in units of `dataset.batch_size`.
    Beyond it no group starts, and only running groups can fill the batch."""
    on_exhausted: Literal["error", "smaller_batch"] = "error"
    """Behavior if the batch is still incomplete after `max_batches`. `error` saves and ends the run
    with the counts and a remedy. `smaller_batch` trains on the existing groups (at least one per
    minibatch), or ends the run if there are fewer."""


RESUMABLE: Final = 2
"""Newest checkpoints that a run can continue from: the last one, and one in case it is damaged."""


class CheckpointConfig(Record):
    """Checkpoints. `areal-lab train --resume` continues from them."""

    resumable: bool = True
    """Also save the state for `--resume`: the optimizer, and groups that were started but not
    trained on. It takes three times the model's float32 size, in the newest two checkpoints."""
    keep: Whole = 0
    """Number of newest checkpoints to keep, in addition to the one with the best held-out reward; 0
    keeps all."""
    asynchronous: bool = False
    """Continue training while a checkpoint is written from a copy in main memory (the model in
    float32, and the state of `resumable`). One checkpoint is written at a time: the next one, and
    the end of the run, wait for it."""
    open_groups: Literal["restart", "finished", "tokens"] = "restart"
    """Saved part of groups that were started but not trained on. `restart` saves nothing: the
    groups start over from their prompts, with the same random numbers. `finished` saves tokens and
    rewards of groups that wait for training. `tokens` also saves the tokens so far of running
    groups."""


SchedulerType = Literal["local", "ray", "slurm", "manual"]


class SchedulerConfig(Record):
    """Start of the host agents."""

    type: SchedulerType = "local"
    """How host agents start. `local` starts them as processes of this machine (none for
    `cluster.n_nodes=1`). `ray` starts them in a placement group of a Ray cluster, `slurm` as one
    task per node, in the current allocation or in a new one. `manual` waits for agents that you
    start (`areal-lab host --join`)."""
    this_host: bool = True
    """Use the machine of the run as one of its hosts (`type=manual`)."""
    ray_address: str = "auto"
    """Ray cluster (`type=ray`): `HOST:PORT`, `auto` for the cluster of this machine, or `local` for
    a private cluster on this machine, for tests."""
    ray_resources: dict[str, Positive] = Field(default_factory=dict[str, float])
    """Resources that each host needs in addition to one CPU and its GPUs (`type=ray`), by the names
    given to `ray start --resources`, such as `{engine: 1}`."""
    slurm_args: list[str] = Field(default_factory=list)
    """Further options of `sbatch`, or of `srun` in an allocation (`type=slurm`), such as
    `[--partition=gpu, --time=12:00:00]`."""
    slurm_jobs: Literal["one", "per_host"] = "one"
    """`one` starts all agents in the current allocation, or else in one job. `per_host` starts a
    separate job per agent, which Slurm can replace on any node (`type=slurm`)."""
    start_timeout_s: Positive = 300.0
    """Timeout for all hosts to join, and for the replacement of a lost host to join."""


class ClusterConfig(Record):
    """Hosts of a run."""

    n_nodes: Count = 1
    """Number of hosts. The last ones train (`trainer_nodes`), the others generate. A single host
    does both."""
    n_gpus_per_node: Whole = 0
    """GPUs that each host must have; with 0 the run computes on CPUs."""
    trainer_nodes: Whole = 0
    """Number of hosts that train; 0 takes the smallest number that fits the trainer's processes."""
    spare_nodes: Whole = 0
    """Number of hosts, among `n_nodes`, that stay idle until they replace lost hosts."""
    address: str = ""
    """Address of this machine for the hosts; empty takes the address of the default route, or the
    loopback address with `scheduler.type=local`."""
    port: Annotated[int, Ge(0), Le(65535), About(hint="0 takes a free one")] = 0
    """Port at which hosts join."""
    heartbeat_s: Positive = 1.0
    """Interval of heartbeats to each host, and timeout of their replies."""
    lost_after: Count = 3
    """Number of missed heartbeats in a row after which a host is lost."""
    lease_s: Positive = 10.0
    """Time without a heartbeat after which a host ends its processes; the run counts such a host as
    lost."""
    shared_files: Literal["auto", "never"] = "auto"
    """Reading of folders between hosts: `auto` tests with a file whether they share paths, `never`
    fetches all folders over HTTP."""


class ScalingConfig(Record):
    """Engines join and leave while the run continues (`areal_lab.control.scaling`)."""

    max_engines: Annotated[Whole, About(unit="engines", hint="0 keeps the engines")] = 0
    """Maximum number of engines; 0 keeps the initial number."""
    min_engines: Annotated[Count, About(unit="engines")] = 1
    """Minimum number of engines. Needs `max_engines`."""
    window_steps: Count = 4
    """Training steps over which a scaling decision is computed."""
    cooldown_steps: Whole = 1
    """Training steps after a change without a new decision, in addition to the steps in which the
    groups in flight at the change end."""
    tolerance: Annotated[float, Gt(0), Lt(1)] = 0.05
    """Share of the time that the trainer may wait for groups before an engine is added. Engines are
    removed if the share is below half of this and groups wait for training."""

    def rule(self, startup_s: float) -> ScalingRule | None:
        """Return the rule by which engines join and leave; None if they stay.

        Args:
            startup_s: from a decision until a new engine works.
        """
        if not self.max_engines:
            return None
        return ScalingRule(**{**self.model_dump(), "startup_s": startup_s})


SinkName: TypeAlias = Literal["tensorboard", "wandb", "swanlab", "trackio"]


class BoundedDriftConfig(Record):
    """What staleness may do to the policy, for `schedule=bounded_drift`; it sets eta by it."""

    max_drift: Annotated[float, Gt(0), About(unit="nats", hint=".inf has no bound")] = MAX_DRIFT
    """Largest `drift`. Cells of `reproductions.learning.where_staleness_hurts` lose reward above
    0.05 (naive) and 0.08 (decoupled)."""
    max_weight_deviation: Annotated[float, Gt(0), About(hint=".inf has no bound")] = math.inf
    """Largest mean |w - 1| of the weights w = pi_prox / pi_behav (`decoupled`)."""
    min_effective_share: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Smallest effective sample size of these weights, as a share of the tokens; 0 has no bound."""
    min_eta: Annotated[NonNegative, About(unit="versions")] = 0.0
    """Smallest eta, with which a run starts."""

    @property
    def bound(self) -> DriftBound:
        """The bounds, without one on the largest eta."""
        return DriftBound(**self.model_dump())


class EnvironmentConfig(Record):
    """Environment of another library, in its own Python (`dataset.type=environment`,
    docs/environments.md).
    """

    name: str = ""
    """Name of the environment in its library, such as `sums-v1` (verifiers) or
    `tasks.py@sums` (inspect-ai); short form: `environment=NAME`."""
    standard: str = "verifiers"
    """Library of the environment: `verifiers`, `inspect`, or a file with a class `Standard`."""
    python: str = ""
    """Python of the environment, 3.11 or newer, such as `envs/NAME/bin/python`; it needs the
    library and the environment, and nothing of this package."""
    args: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Settings of the environment, such as `{num_tasks: 500}`."""
    workers: Count = 1
    """Processes of the environment; each runs many samples at once."""
    timeout_s: Positive = 600.0
    """Timeout of a sample, which then has no reward."""
    max_turns: Whole = 0
    """Maximum calls of the model in a sample; 0 leaves it to the environment."""


class AlarmsConfig(Record):
    """Alarms on the metrics of a run; they never change or end it."""

    off: list[AlarmName] = Field(default_factory=list[AlarmName])
    """Alarms to disable."""
    steps: Annotated[int, Ge(1), About(unit="steps")] = 5
    """Number of training steps in a row beyond a bound that raise an alarm, and within the bound
    that end it."""
    ratio: Positive = 0.1
    """Largest distance of `ratio_mean` and `behavior_weight_mean` from 1."""
    drift: Annotated[float, Gt(0), About(unit="nats")] = 0.2
    """Largest `drift`. `reproductions.learning.where_staleness_hurts` shows the effect of a larger
    one."""
    weight_deviation: Positive = 0.05
    """Largest `weight_deviation`, and the value that its trend may not lead to within 20 steps."""
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
    steps without held-out measurements."""
    solved: Annotated[float, AllowInfNan(False)] = 0.9
    """Mean reward at which the task counts as solved. Then equal rewards, low entropy and responses
    at the limit raise no alarm."""


class TensorBoardConfig(Record):
    """TensorBoard (`pip install tensorboard`)."""

    path: str = ""
    """Folder of the event files; empty takes `tensorboard/` in the run folder."""


class WandbConfig(Record):
    """Weights & Biases (`pip install wandb`)."""

    mode: Literal["offline", "online"] = "offline"
    """`offline` writes files for `wandb sync`; `online` sends everything immediately."""
    project: str = "areal_lab"
    """Project of the run."""
    entity: str = ""
    """User or team; empty takes the one of the login."""
    group: str = ""
    """Group of runs."""
    name: str = ""
    """Name of the run; empty takes the name of the run folder."""
    tags: list[str] = Field(default_factory=list[str])
    """Tags of the run."""
    dir: str = ""
    """Folder of its files; empty takes the run folder."""


class SwanLabConfig(Record):
    """SwanLab (`pip install swanlab`)."""

    mode: Literal["offline", "online"] = "offline"
    """`offline` writes files for `swanlab sync`; `online` sends everything immediately."""
    project: str = "areal_lab"
    """Project of the run."""
    workspace: str = ""
    """User or organization; empty takes the one of the login."""
    group: str = ""
    """Group of runs."""
    name: str = ""
    """Name of the run; empty takes the name of the run folder."""
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
    """Name of the run; empty takes the name of the run folder."""
    space_id: str = ""
    """Hugging Face Space to send to; empty keeps everything on this machine."""
    dir: str = ""
    """Folder of its database; empty takes `trackio/` in the run folder."""


class StatsLoggerConfig(Record):
    """Options of sinks, named as these tools name them."""

    close_timeout_s: Annotated[Positive, About(hint="sinks need a few seconds to close")] = 20.0
    """Timeout for sinks at the end of a run; summary.json counts the items that were not sent."""
    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    swanlab: SwanLabConfig = Field(default_factory=SwanLabConfig)
    trackio: TrackioConfig = Field(default_factory=TrackioConfig)
