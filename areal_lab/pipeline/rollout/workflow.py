"""Open the workflow of a configuration, and make the rollout.

If samples of the workflow wait for clients outside of the run, the run folder has their address:

gateway.json    {"url": ..., "admin_key_file": ...}, as long as the workflow is open
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from areal_lab.agents.workflow import Attended, Opens, Workflow, opened
from areal_lab.control.routing import routing_named
from areal_lab.engines.protocol import PauseMode
from areal_lab.models.vision import read_vision_facts
from areal_lab.pipeline.rollout.groups import Rollout, sampling_params
from areal_lab.pipeline.rollout.turns import TurnRouter
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.resolve.resolved import Served
from areal_lab.rewards.service import FailureRate, RewardService
from areal_lab.runlog.folder import RunFolder
from areal_lab.shell.display import Display


async def open_rollout(
    served: Served,
    *,
    engines: ServerPool,
    rewards: RewardService,
    folder: RunFolder,
    display: Display,
    stack: AsyncExitStack,
    max_error_rate: float | None = None,
) -> Rollout:
    """Open the workflow of a configuration, and return its rollout.

    Args:
        served: the model that is sampled, and the workflow.
        engines: engines that generate.
        rewards: workers that score.
        folder: run folder, for gateway.json.
        display: shows the notices of the workflow.
        stack: closes the workflow.
        max_error_rate: maximum failure rate of workflows; None takes `reward.max_error_rate`.
    """
    config, codec, model = served.config, served.codec, served.model
    largest = config.reward.max_error_rate if max_error_rate is None else max_error_rate
    return Rollout(
        engines=engines,
        codec=codec,
        rewards=rewards,
        sampling=sampling_params(config.gconfig, codec, model),
        vision=read_vision_facts(model),
        run_seed=config.seed,
        running_samples=config.rollout.max_running_requests,
        workflow=await stack.enter_async_context(
            open_workflow(served.workflow, model, folder=folder, display=display)
        ),
        context_tokens=served.context_tokens,
        router=TurnRouter(routing_named(config.rollout.routing).make_router()),
        failures=FailureRate(largest=largest),
        interruptions_recompute=engines.pause_mode is not PauseMode.IN_PLACE,
    )


FILE: Final = "gateway.json"


@asynccontextmanager
async def open_workflow(
    made: Workflow | None,
    model: Path,
    *,
    folder: RunFolder,
    display: Display,
) -> AsyncIterator[Workflow | None]:
    """Open a workflow until the end of the block; yields None without one.

    Args:
        made: the workflow of `rollout.workflow`.
        model: folder with the tokenizer of the model that is sampled.
        folder: run folder, for gateway.json.
        display: shows that the workflow starts, which takes an environment a minute, and its
            notices.
    """
    beside: object = made  # `Workflow` does not declare `Opens`
    if isinstance(beside, Opens):
        display.phase("starting the workflow")
    async with opened(made, model) as workflow:
        attended: object = workflow  # `Workflow` does not declare `Attended`
        if not isinstance(attended, Attended):
            yield workflow
            return
        folder.write_json(FILE, attended.address())
        for line in attended.notices():
            display.note(line)
        try:
            yield workflow
        finally:
            if folder.claim is None or not folder.claim.taken:  # else another process owns the file
                (folder.path / FILE).unlink(missing_ok=True)


def waits_for(workflow: Workflow | None) -> str:
    """Describe what samples wait for outside of the run; empty if none waits."""
    attended: object = workflow
    return attended.waiting_for() if isinstance(attended, Attended) else ""
