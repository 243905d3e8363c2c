"""A config becomes a run that can start, or all of its problems; its parts are made here once.

    config --place_run--> Placed      machine, engines and trainer on its devices
                            |  model folder, tokenizer, workflow
                          Served      engines that generate with a model: `eval`, `gateway`
                            |  problems, limits, threads, functions that a program gave
                          Resolved    a training run

Cheap checks come first; the model comes late, since a packaged one is converted at its first use.
A function that has one of these records checks and derives nothing again.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_lab.agents.workflow import Workflow
from areal_lab.config.problem import ConfigError, Problem, attempt, problems_of, refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.control.limits import Limits
from areal_lab.data.problems import ProblemSet
from areal_lab.data.tokenize import TextCodec
from areal_lab.models.folder import ModelFacts, read_model_facts
from areal_lab.models.locate import is_converted_first
from areal_lab.resolve.check import (
    DiskUsage,
    check_model,
    check_other_models,
    check_problems,
    check_settings,
    check_space,
    check_tokens,
    refuse,
)
from areal_lab.resolve.functions import (
    check_functions,
    check_gold_answers,
    check_workflow_model,
    workflow_of,
)
from areal_lab.resolve.limits import Threads, limits_of, threads_of, usable_context, version_bytes
from areal_lab.resolve.memory import estimate
from areal_lab.resolve.notes import notes
from areal_lab.resolve.placement import Placed, place_servers
from areal_lab.resolve.shared_gpu import GpuShare, share_gpu
from areal_lab.resolve.trainer import check_division
from areal_lab.resolve.vision import check_images, check_vision_model
from areal_lab.rewards import usable
from areal_lab.rewards.service import RewardFunction

if TYPE_CHECKING:
    from areal_lab.functional.losses.policy import (
        HasLoss,  # loads torch, which this process does without
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Served(Placed):
    """A model, and the engines that generate with it."""

    model: Path
    """Its folder."""
    facts: ModelFacts
    codec: TextCodec
    version_bytes: int
    """Upper bound of the bytes to transfer per version."""
    workflow: Workflow | None = None
    """It is not open yet."""
    gpu_share: GpuShare | None = None
    """Memory of the GPUs that engines and trainer share; None if they share none."""

    @property
    def context_tokens(self) -> int:
        """Most tokens of a sample of several turns, its prompt included."""
        if self.config.gconfig.max_tokens:
            return self.config.gconfig.max_tokens
        found = self.facts.context_tokens
        return sys.maxsize if found is None else usable_context(self.engines, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Served):
    """A training run that can start."""

    problems: ProblemSet
    limits: Limits
    """Of the coordinator."""
    threads: Threads
    """On this machine."""
    notes: tuple[str, ...]
    """Settings that may not do what the user expects, one line each."""
    reward_fn: RewardFunction | str
    loss: Callable[..., HasLoss] | None = None
    """Used instead of the loss that `actor` names."""
    advantage: Callable[..., Any] | None = None
    """Used instead of the advantages that `actor` names."""

    given: tuple[str, ...] = ()
    """Functions that a program gave (`SavedRun.given`)."""


def resolve(
    config: TrainConfig,
    problems: object = None,
    loss: Callable[..., HasLoss] | None = None,
    reward_fn: RewardFunction | str | None = None,
    advantage: Callable[..., Any] | None = None,
) -> Resolved:
    """Check everything that can be checked before a process starts.

    Args:
        config: of the run.
        problems: replace `config.dataset`; see `data.sources.given_problems`.
        loss: used instead of the loss that `config.actor` names; see `functional.PolicyLoss`.
        reward_fn: used instead of `config.reward.fn`.
        advantage: used instead of the advantages that `config.actor` names; see
            `training.objective.advantages.Advantages`.

    Raises:
        ConfigError: one line per problem, with the value, the bound and the fix.
    """
    if reward_fn is not None:
        check_given_reward(config, reward_fn)
    checked = check(config, problems)
    if reward_fn is None:
        asked = (*checked.problems.train, *checked.problems.held_out)
        refuse([*check_gold_answers(config, asked)])
    if loss is not None:
        from areal_lab.training.objective.loss import (
            check_loss,  # torch, which the caller has by now
        )

        try:
            check_loss(loss, "loss")
        except ValueError as error:
            raise ConfigError(*problems_of(error, "loss", named=True)) from error
    if advantage is not None:
        from areal_lab.training.objective.advantages import check_given  # torch, as above

        try:
            check_given(advantage)
        except ValueError as error:
            raise refusal("advantage", f"advantage {error}") from error
    return replace(
        checked,
        loss=loss,
        advantage=advantage,
        reward_fn=reward_fn or config.reward.fn,
        given=given_names(reward_fn=reward_fn, loss=loss, advantage=advantage),
    )


def check(
    config: TrainConfig, problems: object = None, *, disk_usage: DiskUsage = shutil.disk_usage
) -> Resolved:
    """As `resolve`, without scoring gold answers, which may take seconds.

    Args:
        config: of the run.
        problems: replace `config.dataset`.
        disk_usage: tests replace it.

    Raises:
        ConfigError: with all problems; checks that need the model come last.
    """
    # refuses names and keywords, which `check_functions` then calls
    placed = check_settings(config, own_problems=problems is not None)
    found = list(check_functions(config))
    workflow = attempt(found, lambda: workflow_of(config), "rollout.workflow")
    chosen = attempt(found, lambda: check_problems(config, problems), "dataset")
    model, facts = read_model(config, found, disk_usage)
    others = list(check_other_models(config))
    found += others or check_division(config, placed.trainer.sizes)
    found += check_workflow_model(workflow, model)
    found += check_vision_model(placed, model)
    version = version_bytes(config, model, facts.parameters)
    found += check_space(config, facts, version, disk_usage)
    codec: TextCodec | None = None
    if chosen is not None:
        asked = (*chosen.train, *chosen.held_out)
        prompts = [one.prompt for one in asked]
        codec = attempt(
            found,
            lambda: check_tokens(config, placed.engines, prompts, model, facts),
            "actor.path",
        )
        found += check_images(config, placed.engines, asked, model, facts.context_tokens)
    share = attempt(found, lambda: share_gpu(placed, model, chosen), "rollout.share_gpu")
    refuse(found)
    assert chosen is not None, "refused above"
    assert codec is not None, "refused above"
    return Resolved(
        **parts_of(placed),
        model=model,
        facts=facts,
        codec=codec,
        version_bytes=version,
        workflow=workflow,
        problems=chosen,
        limits=limits_of(config),
        threads=threads_of(placed),
        gpu_share=share,
        notes=(*notes(placed), *([] if share is None else [share.line()])),
        reward_fn=config.reward.fn,
    )


def serve(
    placed: Placed, model: Path, facts: ModelFacts, codec: TextCodec, workflow: Workflow | None
) -> Served:
    """Engines on a model; the caller has checked both."""
    return Served(
        **parts_of(placed),
        model=model,
        facts=facts,
        codec=codec,
        version_bytes=version_bytes(placed.config, model, facts.parameters),
        workflow=workflow,
    )


def serve_unchecked(config: TrainConfig, model: Path) -> Served:
    """Engines on a model, of a config that another process has checked."""
    return serve(
        place_servers(config),
        model,
        read_model_facts(model),
        TextCodec.load(model),
        workflow_of(config),
    )


def read_model(
    config: TrainConfig, found: Sequence[Problem], disk_usage: DiskUsage = shutil.disk_usage
) -> tuple[Path, ModelFacts]:
    """Folder and facts of the model.

    Raises:
        ConfigError: with the problems found before and those of the model.
    """
    if found and is_converted_first(config.actor.path):
        raise ConfigError(*found)  # at once, not after the conversion
    try:
        folder = check_model(config, disk_usage)
        return folder, read_model_facts(folder)
    except ValueError as error:
        raise ConfigError(*found, *problems_of(error, "actor.path")) from error


def memory_notes(resolved: Resolved) -> list[str]:
    """Warn of a trainer on a CPU that may not fit into memory."""
    trainer = resolved.trainer
    if trainer.device != "cpu":
        return []
    note = None
    # If full micro-batches fit, no prompt needs to be measured, which takes a tokenizer.
    for bounded_by in (None, resolved.problems):
        estimated = estimate(resolved.config, resolved.model, trainer.sizes, bounded_by)
        note = None if estimated is None else estimated.note(resolved.machine.memory_bytes)
        if note is None:
            break
    return [] if note is None else [note]


def given_names(**given: object) -> tuple[str, ...]:
    """Names of the functions that a program gave; the others are None."""
    return tuple(name for name, function in given.items() if function is not None)


def check_given_reward(config: TrainConfig, reward_fn: RewardFunction | str) -> None:
    """Check that a reward function that a program gave can be called as one.

    Raises:
        ConfigError: in one line.
    """
    try:
        if isinstance(reward_fn, str):
            usable.check(reward_fn, config.reward.sandbox, config.reward.kwargs)
        else:
            usable.check_reward(reward_fn, {}, config.reward.sandbox)
    except ValueError as error:
        name = "" if isinstance(reward_fn, str) else getattr(reward_fn, "__name__", "")
        text = " ".join(f"reward_fn {name} {error}".split())
        raise refusal("reward_fn", text) from error


def parts_of(record: Placed) -> dict[str, Any]:
    """The fields of a record, for one that has more of them."""
    return {one.name: getattr(record, one.name) for one in fields(record)}
