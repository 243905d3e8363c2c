"""Unmodified agents of the user: they call the run's gateway as they would call OpenAI or
Anthropic.

    run_agent_return_reward(data) -> reward
            | base_url, api_key
            v
    gateway (one of the run) --> the session of this sample --> turns on the run's engines

The user writes only the function. It runs on the event loop (`inline`), or in a separate process
that is killed after a timeout (`subprocess`). However it ends, its sample has an outcome, and its
running requests are aborted. With `environment`, an environment of another library takes the place
of the function, in a process of that environment's Python (`hosting.runner`). For programs that the
run does not start, see `hosting.online`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import secrets
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, get_args

from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.gateway.server import base_url, bind, served
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.hosting.conversations import (
    RUN_REQUESTS,
    Conversations,
    Serving,
    check_gateway,
    episode_of,
    run_limits,
)
from areal_lab.agents.hosting.runner import Runners
from areal_lab.agents.process import agent_function
from areal_lab.agents.workflow import Episode, WorkflowEngine
from areal_lab.config.sections import EnvironmentConfig
from areal_lab.rewards.service import RewardOutcome, RewardService
from areal_lab.rewards.worker import reward_of

Mode = Literal["inline", "subprocess", "environment"]
_THREADS: Final = 1024
"""Threads of the loop's default executor; each starts when it is needed."""
FUNCTION: Final = "areal_lab.agents.process:AgentFunction"


class Agent:
    """Run one agent per sample; the agent's calls are the turns of the sample.

    The agent returns a number for the whole sample, or `{id of a reply: number}`. If it returns
    None, or sampled no reply, the sample has no reward and its group is not trained on.

    Args:
        fn: `module:function` of `data`, sync or async, that returns the reward. `data` has the
            problem's fields, and `base_url` and `api_key` of the sample.
        environment: with `environment`, its settings, in place of `fn`, `workers` and `timeout_s`.
        mode: `inline`, `subprocess` or `environment`. `subprocess` also sets OPENAI_BASE_URL,
            OPENAI_API_KEY and those of Anthropic, for programs that read them.
        workers: number of processes (concurrent samples), with `subprocess`.
        timeout_s: time limit of a sample.
        requests: concurrent calls of all samples; one more is refused with 429.
        session_requests: concurrent calls of one sample.
        turn_discount: discount of a reward from a reply to the one before it.
        turn_discount_style: `tree` carries rewards back along each conversation; `linear` in order
            of creation, as AReaL does, so parallel conversations get each other's rewards.
        tool_call_parser: grammar of tool calls (`tool_calls.GRAMMARS`); `auto` takes the one
            that the model's template writes.
        template: file of a chat template, instead of the model's.
        describe_tools: whether tools are described in the system message if the template ignores
            them. False leaves that to the agent's own messages.

    Raises:
        ValueError: a number is out of its bounds, or the function cannot be imported.
    """

    def __init__(
        self,
        *,
        fn: str = "",
        environment: EnvironmentConfig | None = None,
        mode: Mode = "inline",
        workers: int = 4,
        timeout_s: float = 3600.0,
        requests: int = RUN_REQUESTS,
        session_requests: int = 64,
        turn_discount: float = 1.0,
        turn_discount_style: str = "tree",
        tool_call_parser: str = "auto",
        template: str = "",
        describe_tools: bool = True,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode is {mode!r}, but must be {', '.join(get_args(Mode))} or online")
        if (mode == "environment") != (environment is not None):
            raise ValueError("mode environment and dataset.type=environment need each other")
        if environment is None and not fn:
            raise ValueError("fn is empty, but must be module:function")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, but must be > 0 (seconds)")
        if workers < 1:
            raise ValueError(f"workers is {workers}, but must be >= 1")
        self._serving = Serving(
            tool_call_parser=tool_call_parser,
            template=template,
            describe_tools=describe_tools,
            turn_discount=turn_discount,
            turn_discount_style=turn_discount_style,
            limits=run_limits(
                requests=requests,
                session_requests=session_requests,
                # Sessions end with their agents, which may have to wait for a process first.
                session_timeout_s=math.inf,
            ),
        )
        self._fn = fn
        self._function: Callable[..., Any] | None = agent_function(fn) if mode == "inline" else None
        self._environment = environment
        self._workers = workers
        self._timeout_s = timeout_s
        self._stack = AsyncExitStack()

    def check_model(self, model: Path) -> None:
        """See `ReadsModel`."""
        self._serving.check_model(model)

    async def open(self, model: Path) -> None:
        """See `Opens`: start the gateway and the processes of the agents."""
        self._conversations = Conversations(model, self._serving)
        self._service = Service(
            _not_over_http,
            admin_key=secrets.token_urlsafe(32),
            model=model.name,
            limits=self._serving.limits,
        )
        # Agents on the event loop may also use its default executor and wait for engines there.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "run"))
        listener = bind()
        self._url = base_url(listener)
        self._gateway = await self._stack.enter_async_context(served(self._service, listener))
        if self._environment is not None:
            self._runners = await self._stack.enter_async_context(Runners(self._environment))
        elif self._function is None:
            self._processes = await self._stack.enter_async_context(
                RewardService(
                    FUNCTION,
                    kwargs={"fn": self._fn},
                    timeout_s=self._timeout_s,
                    workers=self._workers,
                    max_error_rate=1.0,  # the run counts failures of workflows itself
                )
            )

    async def close(self) -> None:
        """Stop the gateway and the processes."""
        await self._stack.aclose()

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        """See `Workflow.run`."""
        check_gateway(self._gateway)
        name = secrets.token_hex(8)
        conversation = self._conversations.open(engine, name)
        session, key = self._service.start_session(name, conversation=conversation)
        given = {**data, "base_url": f"{self._url}/v1", "api_key": key}
        rewards: Mapping[str, float] = {}
        outcome: RewardOutcome | None = None
        metrics: dict[str, float] = {}
        cut_off = False
        try:
            if self._environment is None:
                outcome, rewards = await self._reward(given)
            else:
                address = f"{self._url}/key/{key}/v1"
                played = await self._runners.run(str(data.get("task")), address)
                outcome, cut_off = played.outcome, played.truncated
                metrics = {**played.metrics, **outcome.rewards}
            for reply, reward in rewards.items():
                call, _, index = reply.partition("/")
                number = int(index) if index.isdecimal() else None
                self._service.set_reward(session, reward, call, number)
            if outcome.status == "ok" and not rewards and session.interactions:
                self._service.set_reward(session, outcome.reward)
        except ApiError as error:
            outcome = RewardOutcome("error", math.nan, detail=str(error))
        finally:
            self._service.end_session(session)
            if outcome is None or outcome.status != "ok":
                engine.give_up()  # nothing reads the rest
        if outcome.status != "ok":
            check_gateway(self._gateway)
        # Tracebacks contain the data that agents got.
        outcome = replace(outcome, detail=outcome.detail.replace(key, "(key of its session)"))
        await self._service.settled(session)
        discount = self._serving.turn_discount
        self._service.export(session, style="concat", discount=discount)
        if outcome.status == "ok" and not session.interactions:
            detail = "the agent returned a reward, but asked the model for nothing"
            outcome = RewardOutcome("error", math.nan, detail=detail)
        of_turns = outcome.status == "ok" and (bool(rewards) or discount < 1)
        episode = episode_of(conversation, outcome, of_turns=of_turns)
        episode = replace(episode, metrics=metrics)
        return replace(episode, end="turns") if cut_off and episode.end == "stop" else episode

    async def _reward(self, data: Mapping[str, Any]) -> tuple[RewardOutcome, Mapping[str, float]]:
        """Return the agent's reward, and rewards of single replies by their ids."""
        if self._function is None:
            (outcome,) = await self._processes.score([""], data)
            return outcome, outcome.rewards
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(self._function):
                    value = await self._function(dict(data))
                else:
                    value = await _in_thread(self._function, dict(data))
                if inspect.isawaitable(value):  # of a function that a decorator wraps
                    value = await value
            if value is None:
                return RewardOutcome("refused", math.nan, detail="the agent returned None"), {}
            reward, rewards = reward_of(value)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return RewardOutcome("error", math.nan, detail="the agent canceled itself"), {}
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and limit.expired():
                detail = f"the agent took more than {self._timeout_s:g} s"
                return RewardOutcome("timeout", math.nan, detail=detail), {}
            return RewardOutcome("error", math.nan, detail=traceback.format_exc()), {}
        return RewardOutcome("ok", reward, rewards), rewards


async def _in_thread(function: Callable[..., Any], data: dict[str, Any]) -> Any:
    """Call a function in a daemon thread: a hung call does not delay the end of the run.

    A pool would not do: as many calls wait for engines as there are samples, and other work of the
    run that needs a thread, such as new weights for these engines, would wait behind them.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def tell(value: Any, error: BaseException | None) -> None:
        if not done.done():  # it took too long
            done.set_result((value, error))

    def call() -> None:
        value, error = None, None
        try:
            value = function(data)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the run has ended, and its event loop is closed
            loop.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=call, name="agent", daemon=True).start()
    value, error = await done
    if error is not None:
        raise error
    return value


def _not_over_http(task_id: str) -> NoReturn:
    raise ApiError(403, f"sessions of a run are started by the run, and not for {task_id!r}")
