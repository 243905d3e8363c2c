"""Evaluate a model on a data set, with the engines and reward workers of a run and no trainer.

check -> engines, reward workers up -> sample and score every problem -> results.json
                                          samples.jsonl grows meanwhile
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from areal_lab.config.problem import ConfigError, problems_of, refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.data.benchmarks import benchmark_named, benchmark_problems, is_test
from areal_lab.data.problems import Problem
from areal_lab.data.sources import load_problems
from areal_lab.data.tokenize import TextCodec
from areal_lab.models.folder import read_model_facts
from areal_lab.pipeline.evaluation_results import SampleResult, results, sample_lines, samples_of
from areal_lab.pipeline.fleet import Fleet, first_error
from areal_lab.pipeline.progress import Display
from areal_lab.pipeline.rollout.groups import Rollout
from areal_lab.pipeline.rollout.opened import opened_rollout
from areal_lab.pipeline.rollout.scored import ScoredGroup
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.pipeline.servers.standing import start_standing
from areal_lab.preflight import check as preflight
from areal_lab.preflight.functions import check_functions, check_workflow_model
from areal_lab.preflight.vision import check_images, check_vision_engine
from areal_lab.rewards.service import RewardService
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.records import finite_json

_MESSAGES: Final = 10
"""Progress messages where the display is a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is evaluated, checked by `prepare_evaluation`."""

    config: TrainConfig
    """Of which `actor.path`, `dataset`, `gconfig`, `reward`, `rollout` and `seed` count."""
    problems: tuple[Problem, ...]
    model: Path
    samples: int
    """Per problem."""
    ks: tuple[int, ...]
    out: Path
    """New folder for the results."""


def prepare_evaluation(
    config: TrainConfig, *, samples: int, ks: Sequence[int] = (), limit: int = 0, out: Path
) -> Evaluation:
    """Check an evaluation before any process starts.

    Args:
        config: its `actor.path` is a model folder or name, or a run, whose last checkpoint counts.
        samples: per problem.
        ks: the k of each pass@k; empty takes 1 and `samples`.
        limit: evaluate the first problems only; 0 takes all.
        out: folder to make.

    Raises:
        ConfigError: one line per problem.
    """
    if samples > 1 and config.gconfig.temperature == 0:
        raise refusal("samples", f"{samples} samples at temperature 0 are all equal; take 1 sample")
    if wrong := [k for k in ks if not 1 <= k <= samples]:
        raise refusal("k", f"k is {wrong[0]}, but must be from 1 to samples={samples}")
    if out.exists():
        raise refusal("out", f"{out} exists; name a new folder")
    if config.rollout.addresses:
        raise refusal(
            "rollout.addresses",
            "an evaluation starts its own servers; leave out rollout.addresses",
        )
    if (Path(config.actor.path) / "model").is_dir():
        # A run folder, whose link is its last checkpoint; of `best`, RUN/best is given.
        config = config.with_settings({"actor.path": str(Path(config.actor.path, "model"))})
    found = [*preflight.check_engines(config)]
    if not found:
        found += [*preflight.check_sampling(config), *preflight.check_ports(config)]
    found += check_functions(config)
    problems: tuple[Problem, ...] = ()
    try:
        problems = evaluated_problems(config)[: limit or None]
    except ValueError as error:
        found += problems_of(error, "dataset")
    model = preflight.check_model(config)
    try:
        facts = read_model_facts(model)
    except ValueError as error:
        raise ConfigError(*found, *problems_of(error, "actor.path")) from error
    prompts = [problem.prompt for problem in problems]
    found += preflight.check_tokens(config, prompts, model, facts)
    found += check_vision_engine(config, model)
    found += check_images(config, problems, model, facts.context_tokens)
    found += check_workflow_model(config, model)
    if found:
        raise ConfigError(*found)
    return Evaluation(
        config=config,
        problems=problems,
        model=model,
        samples=samples,
        ks=tuple(sorted(set(ks or (1, samples)))),
        out=out,
    )


def evaluated_problems(config: TrainConfig) -> tuple[Problem, ...]:
    """The held-out problems of a data set; of a benchmark, its test split.

    Raises:
        ValueError: in one line, as `load_problems`.
    """
    dataset = config.dataset
    benchmark = benchmark_named(dataset.type)
    if benchmark is None:
        return load_problems(dataset, seed=config.seed).held_out
    path = dataset.eval_path or dataset.path
    if not path:
        raise ValueError(f"dataset.path is empty, but {benchmark} needs a file of problems")
    problems = benchmark_problems(benchmark, path, dataset.prompt_template)
    return tuple(one for one in problems if is_test(benchmark, one)) or tuple(problems)


async def evaluate(
    evaluation: Evaluation, display: Display, tell: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Run it; writes samples.jsonl, as problems end, and results.json, whose content it returns.

    Args:
        tell: called with the state after each problem.

    Raises:
        Exception: the first error of any part; the samples so far stay.
    """
    config, began_s = evaluation.config, time.time()
    folder = RunFolder(evaluation.out)
    (evaluation.out / "logs").mkdir(parents=True)
    by_problem: dict[int, list[SampleResult]] = {}
    total = len(evaluation.problems)
    every = max(1, total // _MESSAGES)
    async with Fleet() as fleet:
        try:
            rollout, servers = await _start(evaluation, folder, fleet, display)
            display.phase(f"{total} problems, {evaluation.samples} samples each")
            with (evaluation.out / "samples.jsonl").open("w", encoding="utf-8") as file:

                def write(index: int, group: ScoredGroup) -> None:
                    by_problem[index] = samples_of(group)
                    for line in sample_lines(index, group):
                        file.write(json.dumps(line) + "\n")
                    file.flush()
                    tell(_state(by_problem, total))
                    if len(by_problem) % every == 0:
                        display.phase(_state(by_problem, total))

                generating_s = time.time()
                await rollout.held_out(evaluation.problems, samples=evaluation.samples, done=write)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        generating_s = time.time() - generating_s
        found = {
            "model": config.actor.path,
            "dataset": config.dataset.type,
            "path": config.dataset.eval_path or config.dataset.path,
            "reward_fn": config.reward.fn,
            "samples_per_problem": evaluation.samples,
            "temperature": config.gconfig.temperature,
            "max_new_tokens": config.gconfig.max_new_tokens,
            "seed": config.seed,
            "backend": servers.backend or config.rollout.backend,
            **results([by_problem[index] for index in sorted(by_problem)], evaluation.ks),
            "generating_s": generating_s,
            "wall_s": time.time() - began_s,
        }
    value = dict(finite_json(found))
    folder.write_json("results.json", value)
    return value


async def _start(
    evaluation: Evaluation, folder: RunFolder, fleet: Fleet, display: Display
) -> tuple[Rollout, ServerPool]:
    """Start servers and reward workers; `fleet` stops them."""
    config = evaluation.config
    codec = TextCodec.load(evaluation.model)
    pool = await start_standing(config, folder, evaluation.model, fleet=fleet, display=display)
    rewards = await fleet.stack.enter_async_context(
        # Failures are counted and shown.
        RewardService.of(config.reward, log_folder=folder.path / "logs", max_error_rate=1.0)
    )
    rollout = await opened_rollout(
        config,
        evaluation.model,
        codec=codec,
        engines=pool,
        rewards=rewards,
        folder=folder,
        display=display,
        stack=fleet.stack,
        max_error_rate=1.0,
    )
    return rollout, pool


def _state(by_problem: dict[int, list[SampleResult]], total: int) -> str:
    """Problems so far, their mean reward, and failures of the reward function."""
    every = [one for samples in by_problem.values() for one in samples]
    rewards = [one.reward for one in every if one.status == "ok"]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    failed = len(every) - len(rewards)
    errors = f", {failed} rewards failed" if failed else ""
    return f"{len(by_problem)} of {total} problems{mean}{errors}"
