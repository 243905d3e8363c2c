"""Evaluate a model on a data set, with engines and reward workers but without a trainer.

check -> engines, reward workers up -> sample and score every problem -> results.json
                                          appends to samples.jsonl
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from areal_lab.agents.workflow import Episode
from areal_lab.config.problem import Problem as Refused
from areal_lab.config.problem import attempt, refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.data.benchmarks import benchmark_named, benchmark_problems, is_test
from areal_lab.data.problems import Problem
from areal_lab.host.durable import Lines
from areal_lab.pipeline.evaluate import results, sample_lines
from areal_lab.pipeline.fleet import Fleet, first_error
from areal_lab.pipeline.rollout.groups import Rollout
from areal_lab.pipeline.rollout.scored import ScoredGroup
from areal_lab.pipeline.rollout.workflow import open_rollout
from areal_lab.pipeline.servers.fixed_model import start_servers
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.resolve import check as checks
from areal_lab.resolve.functions import (
    check_functions,
    check_gold_answers,
    check_workflow_model,
    workflow_of,
)
from areal_lab.resolve.problems import run_problems
from areal_lab.resolve.resolved import Served, read_model, serve
from areal_lab.resolve.vision import check_images, check_vision_engine
from areal_lab.rewards.service import RewardService
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.records import finite_json
from areal_lab.shell.display import Display

_MESSAGES: Final = 10
"""Number of progress messages if the display is a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Checked settings of an evaluation, made by `prepare_evaluation`."""

    served: Served
    """Model and engines; of the config, `actor.path`, `dataset`, `gconfig`, `reward`, `rollout` and
    `seed` are used."""
    problems: tuple[Problem, ...]
    samples: int
    """Number of samples per problem."""
    ks: tuple[int, ...]
    out: Path
    """New folder for the results."""


def prepare_evaluation(
    config: TrainConfig,
    *,
    samples: int,
    ks: Sequence[int] = (),
    limit: int = 0,
    out: Path,
    given: Sequence[Problem] | None = None,
) -> Evaluation:
    """Check an evaluation before any process starts.

    Args:
        config: `actor.path` is a model folder or name, or a run, whose last checkpoint counts.
        samples: number of samples per problem.
        ks: values of k for pass@k; empty takes 1 and `samples`.
        limit: number of problems to evaluate, from the first; 0 takes all.
        out: new folder for the results.
        given: problems, in place of those of the data set.

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
        # A run folder: its link `model` is the last checkpoint. RUN/best selects the best one.
        config = config.with_settings({"actor.path": str(Path(config.actor.path, "model"))})
    found: list[Refused] = []
    placed = checks.check_engines(config, found, checks.check_sampling, checks.check_ports)
    engines = None if placed is None else placed.engines
    found += check_functions(config)
    workflow = attempt(found, lambda: workflow_of(config), "rollout.workflow")
    problems = () if given is None else tuple(given)
    if given is None:
        chosen = attempt(found, lambda: evaluated_problems(config)[: limit or None], "dataset")
        problems = chosen or ()
    model, facts = read_model(config, found)
    prompts = [problem.prompt for problem in problems]
    codec = attempt(
        found,
        lambda: checks.check_tokens(config, engines, prompts, model, facts),
        "actor.path",
    )
    if placed is not None:
        found += check_vision_engine(placed, model)
    found += check_gold_answers(config, problems)
    found += check_images(config, engines, problems, model, facts.context_tokens)
    found += check_workflow_model(workflow, model)
    checks.refuse(found)
    assert placed is not None, "refused above"
    assert codec is not None, "refused above"
    return Evaluation(
        served=serve(placed, model, facts, codec, workflow),
        problems=problems,
        samples=samples,
        ks=tuple(sorted(set(ks or (1, samples)))),
        out=out,
    )


def evaluated_problems(config: TrainConfig) -> tuple[Problem, ...]:
    """Return the held-out problems of a data set, or the test split of a benchmark.

    Raises:
        ValueError: the data cannot be used; see `run_problems`.
    """
    dataset = config.dataset
    benchmark = benchmark_named(dataset.type)
    if benchmark is None:
        return run_problems(config).held_out
    path = dataset.eval_path or dataset.path
    if not path:
        raise ValueError(f"dataset.path is empty, but {benchmark} needs a file of problems")
    problems = benchmark_problems(benchmark, path, dataset.prompt_template)
    return tuple(one for one in problems if is_test(benchmark, one)) or tuple(problems)


async def evaluate(
    evaluation: Evaluation, display: Display, on_state: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Run an evaluation, write samples.jsonl and results.json, and return the results.

    Args:
        evaluation: the checked evaluation.
        display: shows the progress.
        on_state: called with a description of the state after each problem.

    Raises:
        CancelledError: the evaluation was cancelled; results.json has the problems so far, if any.
        Exception: the first error of any part; samples.jsonl has the samples so far.
    """
    config, began_s = evaluation.served.config, time.time()
    folder = RunFolder(evaluation.out)
    (evaluation.out / "logs").mkdir(parents=True)
    by_problem: dict[int, tuple[Episode, ...]] = {}
    total = len(evaluation.problems)
    every = max(1, total // _MESSAGES)

    def write_results(generating_s: float, *, stopped: bool = False) -> dict[str, Any]:
        found = {
            **({"stopped": f"{len(by_problem)} of {total} problems"} if stopped else {}),
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

    async with Fleet() as fleet:
        try:
            rollout, servers = await start_evaluation(evaluation, folder, fleet, display)
            display.phase(f"{total} problems, {evaluation.samples} samples each")
            with Lines(evaluation.out / "samples.jsonl", new=True) as file:

                def write(index: int, group: ScoredGroup) -> None:
                    by_problem[index] = group.samples
                    for line in sample_lines(index, group):
                        file.append(json.dumps(line).encode() + b"\n")
                    on_state(_state(by_problem, total))
                    if len(by_problem) % every == 0:
                        display.phase(_state(by_problem, total))

                since_s = time.time()
                try:
                    await rollout.held_out(
                        evaluation.problems, samples=evaluation.samples, done=write
                    )
                except asyncio.CancelledError:  # keep the results so far
                    if by_problem:
                        write_results(time.time() - since_s, stopped=True)
                    raise
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        generating_s = time.time() - since_s
    return write_results(generating_s)


async def start_evaluation(
    evaluation: Evaluation, folder: RunFolder, fleet: Fleet, display: Display
) -> tuple[Rollout, ServerPool]:
    """Start servers and reward workers; `fleet` stops them."""
    served = evaluation.served
    pool = await start_servers(served, folder, fleet=fleet, display=display)
    rewards = await fleet.stack.enter_async_context(
        # Rewards may all fail: failures are counted and shown.
        RewardService.of(served.config.reward, log_folder=folder.path / "logs", max_error_rate=1.0)
    )
    rollout = await open_rollout(
        served,
        engines=pool,
        rewards=rewards,
        folder=folder,
        display=display,
        stack=fleet.stack,
        max_error_rate=1.0,
    )
    return rollout, pool


def _state(by_problem: dict[int, tuple[Episode, ...]], total: int) -> str:
    """Describe the finished problems, their mean reward and failures of the reward function."""
    every = [one.outcome for samples in by_problem.values() for one in samples]
    rewards = [one.reward for one in every if one.status == "ok"]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    failed = len(every) - len(rewards)
    errors = f", {failed} rewards failed" if failed else ""
    return f"{len(by_problem)} of {total} problems{mean}{errors}"
