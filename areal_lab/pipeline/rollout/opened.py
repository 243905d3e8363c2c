"""The rollout of a configuration, with its workflow open."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from areal_lab.config.schema import TrainConfig
from areal_lab.control.routing import routing_named
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.protocol import PauseMode
from areal_lab.models.vision import read_vision_facts
from areal_lab.pipeline.progress import Display
from areal_lab.pipeline.rollout.attended import opened_workflow
from areal_lab.pipeline.rollout.groups import Rollout, context_tokens, sampling_params
from areal_lab.pipeline.rollout.turns import TurnRouter
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.rewards.failure_rate import FailureRate
from areal_lab.rewards.service import RewardService
from areal_lab.runlog.folder import RunFolder


async def opened_rollout(
    config: TrainConfig,
    model: Path,
    *,
    codec: TextCodec,
    engines: ServerPool,
    rewards: RewardService,
    folder: RunFolder,
    display: Display,
    stack: AsyncExitStack,
    max_error_rate: float | None = None,
) -> Rollout:
    """Open the workflow of a configuration, and return its rollout.

    Args:
        config: of the run.
        model: folder with the tokenizer of the model that is sampled.
        codec: that tokenizer.
        engines: generate.
        rewards: score.
        folder: gets the address of what samples wait for.
        display: shows it.
        stack: closes the workflow.
        max_error_rate: of workflows; None is `reward.max_error_rate`.
    """
    reward = config.reward
    largest = reward.max_error_rate if max_error_rate is None else max_error_rate
    return Rollout(
        engines=engines,
        codec=codec,
        rewards=rewards,
        sampling=sampling_params(config.gconfig, codec, model),
        vision=read_vision_facts(model),
        run_seed=config.seed,
        running_samples=config.rollout.max_running_requests,
        workflow=await stack.enter_async_context(
            opened_workflow(
                config.rollout.workflow,
                model,
                sandbox=reward.sandbox,
                folder=folder,
                display=display,
            )
        ),
        context_tokens=context_tokens(config, model),
        router=TurnRouter(routing_named(config.rollout.routing).make_router()),
        failures=FailureRate(largest=largest),
        interruptions_recompute=engines.pause_mode is not PauseMode.IN_PLACE,
    )
