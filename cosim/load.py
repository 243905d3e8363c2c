"""From a YAML file and `a.b=c` overrides to a checked `CosimConfig`.

defaults (cosim.schema) <- YAML file <- overrides, the last one wins
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from areal_lab.config.functions import load_function
from areal_lab.config.given import Overrides, Sources, source_files
from areal_lab.config.load import ALIASES as TRAIN_ALIASES
from areal_lab.config.load import load_record
from areal_lab.config.problem import ConfigError, Kind, Problem, attempt, problems_of
from areal_lab.config.schema import EvaluationConfig, RewardConfig
from areal_lab.config.shipped import cosim_configs, recipes, training_configs
from areal_lab.config.unread import Condition, ReadSettings
from areal_lab.resolve.allocation import layout_of
from areal_lab.resolve.check import (
    check_batches,
    check_limits,
    check_problems,
    check_run_folder,
    check_tokens,
    refuse,
)
from areal_lab.resolve.functions import check_objective
from areal_lab.resolve.learning import cannot_learn, unlikely_to_learn
from areal_lab.resolve.limits import Threads, limits_of, rollout_settings
from areal_lab.resolve.placement import Placed, this_machine
from areal_lab.resolve.resolved import Resolved, parts_of, read_model, serve
from areal_lab.resolve.unread import TRAIN
from areal_lab.rewards.usable import check_reward
from areal_lab.rewards.wire import is_address
from areal_lab.runlog.read_run import read_events
from areal_lab.runlog.records import Log
from areal_lab.runlog.replay import limits_from_fields
from areal_lab.sinks.start import check_sinks
from areal_lab.training.objective.advantages import choose_advantages
from areal_lab.training.objective.loss import choose_loss
from areal_lab.training.objective.trial_call import try_objective
from areal_lab.training.settings import TrainerSettings
from cosim.along import train_actions
from cosim.cluster import system_of
from cosim.schema import CosimConfig
from simulator.run.system import System

ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {**TRAIN_ALIASES, "preset": "simulator.preset"}
)
"""Other names of settings."""


_PROCESSES: Final = (
    *("rollout.engine_args", "rollout.pause_mode", "rollout.transfer", "rollout.threads"),
    *("rollout.transfer_timeout_s", "rollout.device", "rollout.port", "rollout.addresses"),
    *("rollout.ready_timeout_s", "rollout.health_interval_s", "rollout.health_timeout_s"),
    *("rollout.stall_timeout_s", "rollout.max_engine_restarts", "rollout.stream_interval"),
    *("rollout.request_timeout_s", "rollout.scaling.", "token_fields", "actor.device"),
    *("actor.shard_ranks", "actor.offload", "actor.collective_timeout_s", "reward.timeout_s"),
    *("reward.workers", "reward.max_error_rate", "evaluation.engine_share"),
    *("evaluation.remeasure", "scheduler.", "cluster.", "checkpoint."),
)
READ: Final = ReadSettings(
    CosimConfig,
    always=(*TRAIN.always, "mode", "objective", "tokens_per_token"),
    conditions=(
        Condition(
            ("rollout.workflow",),
            lambda _: False,
            "on areal-lab cosim, which samples one response to each prompt; leave it out, or use "
            "areal-lab train",
            refused=True,
        ),
        Condition(
            ("actor.param_dtype",),
            lambda _: False,
            "on areal-lab cosim, whose model has no working copies; leave it out, or use areal-lab "
            "train",
            refused=True,
        ),
        Condition(_PROCESSES, lambda _: False, "on areal-lab cosim, which has one process"),
        Condition(
            ("simulator.",),
            lambda config: not config.log,
            "with log, whose schedule is followed",
        ),
        Condition(("log",), lambda config: config.mode == "along", "without mode=along"),
        *TRAIN.conditions,
    ),
)
"""When each setting of a co-simulated run is read."""


def load_cosim(source: Sources = None, overrides: Overrides | None = ()) -> CosimConfig:
    """Merge a YAML file and overrides onto the defaults.

    Args:
        source: a YAML file, also one for `areal-lab train` or the config.yaml of a run; or the name
            of a shipped one (`cosim`) or of a recipe; of several, each wins over those before it;
            None takes the defaults.
        overrides: `a.b=c` each, the value in YAML: `eta=inf`, `objective=naive`; or values by name.
    """
    known = {**training_configs(), **recipes(), **cosim_configs()}
    files = source_files(source, known, "config")
    config = load_record(CosimConfig(), files, overrides, ALIASES, bases=known)
    if config.objective is not None:
        config.actor.use_decoupled_loss = config.objective == "decoupled"
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedCosim(Resolved):
    """A co-simulated run that can start."""

    schedule: System | Log
    """What is simulated, or the log that it follows."""


def resolve_cosim(config: CosimConfig) -> ResolvedCosim:
    """Check everything before a model is loaded.

    A log sets `config.rollout` to its schedule.

    Raises:
        ConfigError: one line per problem.
    """
    found = [
        *READ.refusals(config),
        *cannot_learn(config),
        *check_limits(config),
        *check_batches(config),
        *check_run_folder(config),
        *_check_functions(config),
        *check_sinks(config),
        *_check_mode(config),
        *_check_evaluation(config),
    ]
    problems = attempt(found, lambda: check_problems(config), "dataset")
    model, facts = read_model(config, found)
    engines, codec = layout_of(config).engines, None
    if problems is not None:
        asked = (*problems.train, *problems.held_out)
        if any(one.images for one in asked):
            found.append(
                _problem(
                    "dataset.type",
                    f"dataset.type is {config.dataset.type}, whose problems have images, but "
                    "co-simulation generates text only; use areal-lab train",
                )
            )
        prompts = [one.prompt for one in asked]
        codec = attempt(
            found,
            lambda: check_tokens(config, engines, prompts, model, facts),
            "actor.path",
        )
    refuse(found)
    assert problems is not None, "refused above"
    assert codec is not None, "refused above"
    schedule = read_schedule(config) if config.log else system_of(config)
    placed = Placed(config=config, machine=this_machine(), engines=engines)
    return ResolvedCosim(
        **parts_of(serve(placed, model, facts, codec, workflow=None)),
        problems=problems,
        limits=limits_of(config),
        # More threads may round differently in each run.
        threads=Threads(engine=1, trainer=config.actor.threads or 1),
        notes=(*READ.notes(config), *unlikely_to_learn(config)),
        reward_fn=config.reward.fn,
        schedule=schedule,
    )


def read_schedule(config: CosimConfig) -> Log:
    """The log that a run follows, whose schedule is then the run's."""
    log = read_events(Path(config.log))
    trained = train_actions(log)
    limits = log.header.limits
    found = []
    if len(trained) < config.total_train_steps:
        found.append(
            _wrong("total_train_steps", config.total_train_steps, f"at most {len(trained)}")
        )
    if trained and trained[0].version != 0:
        found.append(
            _problem(
                "log",
                f"log is {config.log}, which begins with version {trained[0].version}, but must "
                "begin with version 0; take the log of a run from its start",
            )
        )
    if limits.get("batch_groups") != config.dataset.batch_size:
        found.append(
            _wrong("dataset.batch_size", config.dataset.batch_size, str(limits["batch_groups"]))
        )
    if limits.get("batch_parts", 1) != 1:
        found.append(
            _problem(
                "log",
                f"log is {config.log}, which trains on a batch in {limits['batch_parts']} parts "
                "(schedule.require_batches), but a co-simulated step trains on a whole batch; take "
                "a log without it",
            )
        )
    samples = next((len(record.segments) for record in log.groups), 0)
    if samples != config.gconfig.n_samples:
        found.append(_wrong("gconfig.n_samples", config.gconfig.n_samples, str(samples)))
    if found:
        raise ConfigError(*found)
    config.rollout = config.rollout.with_settings(rollout_settings(limits_from_fields(limits)))
    return log


def _check_functions(config: CosimConfig) -> Iterator[Problem]:
    """In this process, which is the one that calls them."""
    settings = TrainerSettings(config=config, model_path="", weights_root="")
    for setting, custom, load in (
        ("reward.fn", config.reward.fn, lambda: _load_reward(config.reward)),
        ("actor.loss_fn", config.actor.loss_fn, lambda: choose_loss(settings)),
        ("actor.advantage_fn", config.actor.advantage_fn, lambda: choose_advantages(settings)),
    ):
        try:
            if custom:
                load()
        except ValueError as error:
            yield from problems_of(error, setting)
    misnamed = list(check_objective(config))
    yield from misnamed
    if (config.actor.loss or config.actor.advantage) and not misnamed:
        yield from try_objective(settings)


def _load_reward(reward: RewardConfig) -> None:
    fn = reward.fn
    if is_address(fn):
        raise ValueError(
            f"{fn} is a service, but a co-simulation calls a function of its process; name "
            "module:function"
        )
    check_reward(load_function(fn), reward.kwargs, reward.sandbox)


def _check_mode(config: CosimConfig) -> list[Problem]:
    if config.log and config.mode == "live":
        text = "log is set, but mode=live simulates its schedule; use mode=along, or empty log"
        return [_problem("log", text)]
    if config.mode == "along" and not config.log and config.rollout.schedule == "bounded_drift":
        text = (
            "rollout.schedule is 'bounded_drift', which follows what the model measures, but "
            "mode=along has its schedule before there is a model; use mode=live, or log with the "
            "folder of such a run"
        )
        return [_problem("rollout.schedule", text)]
    unknown = config.tokens_per_token == 0 and config.evaluation.max_problems == 0
    if config.mode == "live" and unknown:
        text = (
            "tokens_per_token is 0, which takes the mean response to held-out problems, but "
            "evaluation.max_problems is 0; set one of them"
        )
        return [_problem("tokens_per_token", text)]
    return []


def _check_evaluation(config: CosimConfig) -> Iterator[Problem]:
    for name in ("temperature", "pass_at"):
        if getattr(config.evaluation, name) != getattr(EvaluationConfig(), name):
            text = (
                f"evaluation.{name} is for areal-lab train: a co-simulated run measures the mean "
                "reward at gconfig.temperature; leave it out"
            )
            yield _problem(f"evaluation.{name}", text)


def _wrong(setting: str, value: object, bound: str) -> Problem:
    return _problem(setting, f"{setting} is {value}, but must be {bound}, as the log or batch has")


def _problem(setting: str, message: str) -> Problem:
    return Problem(Kind.SETTINGS, setting, message)
