"""From a YAML file and `a.b=c` overrides to a checked `CosimConfig`.

defaults (cosim.schema) <- YAML file <- overrides, the last one wins
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from areal_lab.config.functions import load_function
from areal_lab.config.load import ALIASES as TRAIN_ALIASES
from areal_lab.config.load import Overrides, load_record
from areal_lab.config.problem import ConfigError, Kind, Problem, problems_of
from areal_lab.config.schema import EvaluationConfig
from areal_lab.config.shipped import cosim_configs, recipes, settings_file, training_configs
from areal_lab.data.problems import ProblemSet
from areal_lab.models.folder import read_model_facts
from areal_lab.preflight.check import (
    check_batches,
    check_limits,
    check_model,
    check_problems,
    check_run_folder,
    check_tokens,
)
from areal_lab.preflight.functions import check_objective
from areal_lab.rewards.address import is_address
from areal_lab.runlog.read_run import read_events
from areal_lab.runlog.records import Log, Scalar
from areal_lab.sinks.start import check_sinks
from areal_lab.training.objective.advantages import choose_advantages
from areal_lab.training.objective.loss import choose_loss
from areal_lab.training.objective.trial_call import try_objective
from areal_lab.training.settings import TrainerSettings
from cosim.along import train_actions
from cosim.schema import CosimConfig

ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {**TRAIN_ALIASES, "preset": "simulator.preset"}
)
"""Other names of settings."""


def load_cosim(
    source: str | Path | Sequence[str | Path] | None = None, overrides: Overrides = ()
) -> CosimConfig:
    """Merge a YAML file and overrides onto the defaults.

    Args:
        source: a YAML file, also one for `areal-lab train` or the config.yaml of a run; or the name
            of a shipped one (`cosim`) or of a recipe; of several, each wins over those before it;
            None takes the defaults.
        overrides: `a.b=c` each, the value in YAML: `eta=inf`, `objective=naive`; or values by name.

    Raises:
        ConfigError: one line for each unknown key and each value that is not allowed.
        ValueError: in one line: no such file, or it is broken.
    """
    known = {**training_configs(), **recipes(), **cosim_configs()}
    sources = [] if source is None else [source] if isinstance(source, str | Path) else source
    files = [settings_file(one, known, "config") for one in sources]
    config = load_record(CosimConfig(), files, overrides, ALIASES, bases=known)
    if config.objective is not None:
        config.actor.use_decoupled_loss = config.objective == "decoupled"
    return config


def check_cosim(config: CosimConfig) -> tuple[ProblemSet, Path]:
    """Refuse a run that cannot work; return its problems and the folder of its model.

    Raises:
        ConfigError: with all problems.
    """
    found = [
        *check_limits(config),
        *check_batches(config),
        *check_run_folder(config),
        *_check_functions(config),
        *check_sinks(config),
        *_check_mode(config),
        *_check_evaluation(config),
    ]
    problems: ProblemSet | None = None
    try:
        problems = check_problems(config)
    except ConfigError as error:
        found += error.problems
    try:
        folder = check_model(config)
    except ConfigError as error:
        raise ConfigError(*found, *error.problems) from error
    if problems is not None:
        if any(one.images for one in (*problems.train, *problems.held_out)):
            found.append(
                _problem(
                    "dataset.type",
                    f"dataset.type is {config.dataset.type}, whose problems have images, but "
                    "co-simulation generates text only; use areal-lab train",
                )
            )
        prompts = [one.prompt for one in (*problems.train, *problems.held_out)]
        found += check_tokens(config, prompts, folder, read_model_facts(folder))
    if found or problems is None:
        raise ConfigError(*found)
    return problems, folder


def read_schedule(config: CosimConfig) -> Log:
    """The log that a run follows, whose schedule is then the run's.

    Raises:
        ConfigError: if it does not fit the run's settings.
        ValueError: in one line, if it cannot be read.
    """
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
    config.rollout = config.rollout.with_settings(_schedule(limits))
    return log


def _schedule(limits: Mapping[str, Scalar]) -> dict[str, Any]:
    """The schedule of a log as settings of `rollout`, for the run folder."""
    names = {
        "schedule": "schedule",
        "max_head_offpolicyness": "eta",
        "max_concurrent_rollouts": "max_in_flight",
        "batch_order": "order",
        "drop_late": "drop_late",
        "routing": "routing",
    }
    return {name: limits[field] for name, field in names.items() if field in limits}


def _check_functions(config: CosimConfig) -> Iterator[Problem]:
    """In this process, which is the one that calls them."""
    settings = TrainerSettings(config=config, model_path="", weights_root="")
    for setting, custom, load in (
        ("reward.fn", config.reward.fn, lambda: _load_reward(config.reward.fn)),
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


def _load_reward(fn: str) -> None:
    if is_address(fn):
        raise ValueError(
            f"{fn} is a service, but a co-simulation calls a function of its process; name "
            "module:function"
        )
    load_function(fn)


def _check_mode(config: CosimConfig) -> list[Problem]:
    if config.log and config.mode == "live":
        text = "log is set, but mode=live simulates its schedule; use mode=along, or empty log"
        return [_problem("log", text)]
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
