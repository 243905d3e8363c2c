"""Check the custom functions of a config, and its loss and advantages by name.

names and keywords --check_objective--> problems, without torch
functions          --check_functions--> problems; a separate process imports and calls them
"""

from __future__ import annotations

import inspect
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from areal_lab.agents.catalogue import make_workflow
from areal_lab.agents.workflow import ReadsModel, Workflow
from areal_lab.config.functions import load_function
from areal_lab.config.mappings import texts
from areal_lab.config.problem import Kind, Problem, problems_of, refusal
from areal_lab.config.schema import RewardConfig, TrainConfig
from areal_lab.data import problems as data
from areal_lab.host.processes import inherited_environment
from areal_lab.rewards.reasoning_gym import refuse_evaluated
from areal_lab.rewards.sandbox.levels import NoSandbox, choose, runs_programs
from areal_lab.rewards.wire import Unreachable, by_name
from areal_lab.rewards.worker import bound
from areal_lab.training.objective.formula_calls import read_call
from areal_lab.training.objective.formulas import Role
from areal_lab.training.settings import TrainerSettings

_IMPORT_TIMEOUT_S: Final = 120.0
_GOLD_TIMEOUT_S: Final = 2.0
_READ_NUMBERS: Final = tuple(f"areal_lab.rewards.exact:{one}" for one in ("last_number", "gsm8k"))
_READ_GOLD: Final = tuple(f"areal_lab.rewards.{one}:" for one in ("exact", "math_answer", "text"))


def check_functions(config: TrainConfig) -> Iterator[Problem]:
    """Check that the reward function and any custom loss and advantages can be imported."""
    reward = config.reward
    fn, kwargs = by_name(reward.fn, reward.kwargs)
    keywords = json.dumps(kwargs, default=str)
    by = "areal_lab.rewards.usable"
    yield from _check_function("reward.fn", fn, by, reward.sandbox, keywords)
    yield from _check_own_reward(reward)
    yield from _check_tasks(config)
    yield from _check_workflow(config)
    if config.actor.loss_fn:
        yield from _check_function(
            "actor.loss_fn", config.actor.loss_fn, "areal_lab.training.objective.loss"
        )
    if config.actor.advantage_fn:
        yield from _check_function(
            "actor.advantage_fn",
            config.actor.advantage_fn,
            "areal_lab.training.objective.advantages",
        )
    named = config.actor.loss or config.actor.advantage
    if named and not any(check_objective(config)):
        yield from _try_objective(config)


def check_gold_answers(config: TrainConfig, problems: Sequence[data.Problem]) -> Iterator[Problem]:
    """Check that our reward functions that read gold answers can read those of the problems.

    They say so for an empty completion. At random problems, for seconds: some take milliseconds.
    """
    fn, kwargs = by_name(config.reward.fn, config.reward.kwargs)
    if not fn.startswith(_READ_GOLD) or config.rollout.workflow:
        return
    try:
        score = bound(load_function(fn), kwargs, config.reward.sandbox)
    except (TypeError, ValueError, RuntimeError):
        return  # `check_functions` says so
    until_s = time.monotonic() + _GOLD_TIMEOUT_S
    for row in random.Random(0).sample(range(len(problems)), len(problems)):
        example = problems[row].as_example()
        try:
            score("", example)
            if fn in _READ_NUMBERS and not score(example["answer"], example):
                raise ValueError(
                    f"the gold answer {example['answer'][:60]!r} has no number; use another reward "
                    "function"
                )
        except ValueError as error:
            asked = " ".join(problems[row].prompt.split())[-60:]
            yield _wrong(
                "reward.fn", f"reward.fn {fn} cannot score problem {row + 1} ({asked!r}): {error}"
            )
            return
        if time.monotonic() > until_s:
            return


def workflow_of(config: TrainConfig) -> Workflow | None:
    """Make the workflow of a config; None without one.

    Raises:
        ConfigError: with one problem.
    """
    try:
        setting = config.rollout.workflow
        if (setting.get("name"), setting.get("mode")) == ("agent", "environment"):
            if config.dataset.type != "environment":
                raise ValueError("mode is environment, which needs dataset.type=environment")
            setting = {**setting, "environment": config.environment}
        elif config.dataset.type == "environment":
            raise ValueError(
                "dataset.type is environment, which needs {name: agent, mode: environment}"
            )
        return make_workflow(setting, sandbox=config.reward.sandbox)
    except NoSandbox as error:
        raise refusal("reward.sandbox", f"reward.{error}", Kind.MACHINE) from error
    except Exception as error:  # of the user's class
        text = f"rollout.workflow: {str(error) or type(error).__name__}"
        raise refusal("rollout.workflow", text) from error


def _check_workflow(config: TrainConfig) -> Iterator[Problem]:
    """Check that the other settings fit to the workflow."""
    setting = "rollout.workflow"
    if not config.rollout.workflow:
        if config.gconfig.max_tokens:
            yield _wrong(
                "gconfig.max_tokens",
                f"gconfig.max_tokens is {config.gconfig.max_tokens}, but without rollout.workflow "
                "a response is limited by gconfig.max_new_tokens alone; remove it",
            )
        return
    workflow = config.rollout.workflow
    if (workflow.get("name"), workflow.get("mode")) == ("agent", "subprocess") and "fn" in workflow:
        yield from _check_function(setting, str(workflow["fn"]), "areal_lab.agents.process")
    yield from _check_corpus(config)
    if config.actor.overlong_share:
        yield _wrong(
            "actor.overlong_share",
            f"actor.overlong_share is {config.actor.overlong_share:g}, but counts tokens up to "
            "gconfig.max_new_tokens, which is the limit of one turn of a workflow; set it to 0",
        )


def _check_corpus(config: TrainConfig) -> Iterator[Problem]:
    """Check that generated pages are those of the generated problems."""
    dataset, workflow = config.dataset, config.rollout.workflow
    if dataset.type != "chain":
        return
    several = workflow.get("tools")
    for tool in [workflow.get("tool"), *(several if isinstance(several, list | tuple) else ())]:
        corpus = tool.get("corpus") if isinstance(tool, Mapping) else None
        wanted = {"chains": dataset.size, "depth": dataset.depth}
        if isinstance(corpus, Mapping) and {**corpus} != wanted and corpus.keys() == wanted.keys():
            pairs = " and ".join(f"{name} {corpus[name]}" for name in wanted)
            yield _wrong(
                "rollout.workflow",
                f"rollout.workflow: the corpus has {pairs}, but dataset.size is {dataset.size} and "
                f"dataset.depth {dataset.depth}, and a page that is not there cannot be found; "
                "give both the same values",
            )


def check_workflow_model(workflow: Workflow | None, model: Path) -> Iterator[Problem]:
    """Check that the workflow can be opened with this model, on this machine.

    Args:
        model: folder of the model.
    """
    reader: object = workflow
    if not isinstance(reader, ReadsModel):
        return
    try:
        reader.check_model(model)
    except ValueError as error:
        yield _wrong("rollout.workflow", f"rollout.workflow: {error}", Kind.MACHINE)


def check_objective(config: TrainConfig) -> Iterator[Problem]:
    """Check the names and keywords of the loss and the advantages, without torch."""
    actor = config.actor
    for setting, given, custom, role in (
        ("actor.loss", actor.loss, actor.loss_fn, Role.LOSS),
        ("actor.advantage", actor.advantage, actor.advantage_fn, Role.ADVANTAGE),
    ):
        if given and custom:
            yield _wrong(
                setting,
                f"{setting} names {given.get('name')!r}, and {setting}_fn {custom!r}; leave out "
                "one of them",
            )
        elif given:
            yield from read_call(setting, given, role)[1]


def _check_own_reward(reward: RewardConfig) -> Iterator[Problem]:
    """Check keyword arguments and sandbox of one of our own reward functions, if it is one."""
    fn, kwargs = by_name(reward.fn, reward.kwargs)
    if not fn.startswith("areal_lab.rewards."):
        return
    try:
        function = load_function(fn)
    except ValueError:
        return  # `_check_function` says so
    try:
        given: tuple[Any, ...] = () if isinstance(function, type) else ("", {})
        inspect.signature(function).bind(*given, **kwargs)
        if check := getattr(function, "check", None):
            check(**kwargs)
    except (TypeError, ValueError) as error:
        if isinstance(error, Unreachable):
            yield _wrong("reward.fn", f"reward.fn: {error}", Kind.MACHINE)
        else:
            yield _wrong("reward.kwargs", f"reward.kwargs of {reward.fn}: {error}")
        return
    if runs_programs(function):
        try:
            choose(kwargs.get("sandbox", reward.sandbox))
        except NoSandbox as error:
            yield _wrong("reward.sandbox", f"reward.{error}", Kind.MACHINE)


def _check_tasks(config: TrainConfig) -> Iterator[Problem]:
    """Refuse tasks of Reasoning Gym whose scores would run what the model writes."""
    if config.dataset.type != "reasoning_gym":
        return
    reward, given = config.reward, by_name(config.reward.fn, config.reward.kwargs)
    functions = [(given[0], given[1].get("sandbox", reward.sandbox))]
    if given[0] == "areal_lab.rewards.combined:Combined" and isinstance(
        parts := given[1].get("parts"), Mapping
    ):
        functions = [
            (part, "auto")
            if isinstance(part, str)
            else (part.get("fn", ""), part.get("sandbox", "auto"))
            for part in parts.values()
            if isinstance(part, str | Mapping)
        ]
    for fn, sandbox in functions:
        if fn == "areal_lab.rewards.reasoning_gym:ReasoningGym":
            try:
                refuse_evaluated(config.dataset.tasks, sandbox)
            except ValueError as error:
                yield _wrong("dataset.tasks", f"dataset.tasks: {error}")
                return


_USABLE: Final[set[tuple[str, ...]]] = set()
"""Functions that a separate process could use. A sweep checks all of its cells, and a process takes
seconds. One that cannot be used is checked again, because its file may have been corrected."""


def _check_function(
    setting: str, name: str, by: str = "areal_lab.config.functions", *more: str
) -> Iterator[Problem]:
    if (name, by, *more) in _USABLE:
        return
    if name.startswith("areal_lab.rewards."):  # our own, with light imports
        try:
            load_function(name)
        except ValueError as error:
            yield from problems_of(error, setting)
        return
    # Other functions in a separate process: their imports may be heavy.
    try:
        ended = subprocess.run(
            [sys.executable, "-m", by, name, *more],
            capture_output=True, text=True, check=False, timeout=_IMPORT_TIMEOUT_S,
            env=inherited_environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        yield _wrong(setting, f"{setting}: importing {name!r} took over {_IMPORT_TIMEOUT_S:g} s")
        return
    if ended.returncode != 0:
        lines = (ended.stdout.strip() or ended.stderr.strip() or "no reason given").splitlines()
        yield _wrong(setting, f"{setting}: {name!r} cannot be used: {lines[-1]}")
        return
    _USABLE.add((name, by, *more))


def _try_objective(config: TrainConfig) -> Iterator[Problem]:
    """Call the loss and the advantages once, in a process that may import torch and modules."""
    names = ("loss", "advantage", "use_decoupled_loss")
    tried = TrainConfig().with_settings({f"actor.{n}": getattr(config.actor, n) for n in names})
    settings = TrainerSettings(config=tried, model_path="", weights_root="")
    # The cells of a sweep share objectives. Modules of the user's may have changed meanwhile.
    custom = any(":" in text for text in texts([config.actor.loss, config.actor.advantage]))
    if custom:
        lines = _trial_call.__wrapped__(settings.to_json())
    elif "torch" in sys.modules:  # what a process would be for
        try_objective = load_function("areal_lab.training.objective.trial_call:try_objective")
        lines = tuple(problem.message for problem in try_objective(settings))
    else:
        lines = _trial_call(settings.to_json())
    for line in lines:
        # The program says which of the two it is about.
        setting = "actor.advantage" if line.startswith("actor.advantage") else "actor.loss"
        yield _wrong(setting, line)


@lru_cache(maxsize=256)
def _trial_call(settings: str) -> tuple[str, ...]:
    """What `areal_lab.training.objective.trial_call` finds wrong, one line per problem."""
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "areal_lab.training.objective.trial_call", settings],
            capture_output=True, text=True, check=False, timeout=_IMPORT_TIMEOUT_S,
            env=inherited_environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return (f"actor.loss: a trial call took over {_IMPORT_TIMEOUT_S:g} s",)
    if ended.returncode == 0:
        return ()
    told = ended.stdout.strip() or (ended.stderr.strip() or "no reason given").splitlines()[-1]
    return tuple(told.splitlines())


def _wrong(setting: str, message: str, kind: Kind = Kind.SETTINGS) -> Problem:
    return Problem(kind, setting, message)
