"""Your own agent, unchanged: it talks to the run's gateway as it would to OpenAI or Anthropic.

    run_agent_return_reward(data) -> reward
            | base_url, api_key
            v
    gateway (one of the run) --> the session of this sample --> turns on the run's engines

The function is all that a user writes. It runs on the event loop (`inline`), or in a process of its
own that is killed when it takes too long (`subprocess`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import secrets
import traceback
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from areal_lab.agents.chat_format import ChatFormat
from areal_lab.agents.conversation import TreeConversation
from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.gateway.server import base_url, bind, serve
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.gateway.sessions import Limits
from areal_lab.agents.replies import ReplyReader
from areal_lab.agents.session_tree import SessionTree
from areal_lab.agents.template import load_template
from areal_lab.agents.workflow import Episode, WorkflowEngine
from areal_lab.config.functions import load_function
from areal_lab.data.tokenize import TextCodec
from areal_lab.rewards.service import RewardOutcome, RewardService
from areal_lab.rewards.worker import reward_of

Mode = Literal["inline", "subprocess"]
FUNCTION: Final = "areal_lab.agents.process:AgentFunction"


class Agent:
    """Samples whose turns a program of the user asks for.

    Its reward is a number for the whole sample, or `{id of a reply: number}`; None, or no reply at
    all, is no reward: then the group is not trained on.

    Args:
        fn: `module:function` of `data`, sync or async, that returns the reward. `data` has the
            problem's fields, and `base_url` and `api_key` of the sample.
        mode: where it runs. `subprocess` also sets OPENAI_BASE_URL, OPENAI_API_KEY and those of
            Anthropic, for programs that read them.
        workers: processes, with `subprocess`: samples at once.
        timeout_s: of a sample.
        turn_discount: of rewards of single replies, from a reply to the one before it.
        tool_call_parser: how calls of tools are read (`tool_calls.GRAMMARS`); `auto` is the one
            that the model's template writes.
        template: file of a chat template, instead of the model's.

    Raises:
        ValueError: a number is out of its bounds, or the function cannot be imported.
    """

    def __init__(
        self,
        *,
        fn: str,
        mode: Mode = "inline",
        workers: int = 4,
        timeout_s: float = 3600.0,
        turn_discount: float = 1.0,
        tool_call_parser: str = "auto",
        template: str = "",
    ) -> None:
        if mode not in ("inline", "subprocess"):
            raise ValueError(f"mode is {mode!r}, but must be inline or subprocess")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, but must be > 0 (seconds)")
        if not 0 <= turn_discount <= 1:
            raise ValueError(f"turn_discount is {turn_discount}, but must be in [0, 1]")
        if workers < 1:
            raise ValueError(f"workers is {workers}, but must be >= 1")
        self._fn = fn
        self._function: Callable[..., Any] | None = load_function(fn) if mode == "inline" else None
        self._workers = workers
        self._timeout_s = timeout_s
        self._discount = turn_discount
        self._parser = tool_call_parser
        self._template = template
        self._stack = AsyncExitStack()

    async def open(self, model: Path) -> None:
        """Start the gateway, and the processes of the agents.

        Args:
            model: folder with the tokenizer and the chat template.

        Raises:
            ValueError: in one line: the model has no chat template, or one that cannot be used.
        """
        self._form = ChatFormat(load_template(model, self._template or None), TextCodec.load(model))
        self._readers: dict[int, ReplyReader] = {}
        self._service = Service(
            _not_over_http,
            admin_key=secrets.token_urlsafe(32),
            model=model.name,
            limits=Limits(session_timeout_s=self._timeout_s),
        )
        listener = bind()
        self._url = base_url(listener)
        serving = asyncio.create_task(serve(self._service, listener), name="gateway")
        self._stack.push_async_callback(_end, serving)
        if self._function is None:
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
        """Stop both."""
        await self._stack.aclose()

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        """See `Workflow.run`."""
        name = secrets.token_hex(8)
        conversation = TreeConversation(
            SessionTree(self._form, now=datetime.now(UTC), session=name),
            self._reader(engine.context_tokens),
            engine,
            end_tokens=self._form.end_tokens,
        )
        session, key = self._service.start_session(name, conversation=conversation)
        given = {**data, "base_url": f"{self._url}/v1", "api_key": key}
        rewards: Mapping[str, float] = {}
        try:
            outcome, rewards = await self._reward(given)
            for reply, reward in rewards.items():
                self._service.set_reward(session, reward, reply)
            if outcome.status == "ok" and not rewards and session.interactions:
                self._service.set_reward(session, outcome.reward)
        except ApiError as error:
            outcome = RewardOutcome("error", math.nan, detail=str(error))
        finally:
            self._service.end_session(session)
        await self._service.settled(session)
        self._service.export(session, style="concat", discount=self._discount)
        scores = conversation.scores
        returns = conversation.returns(scores)
        if outcome.status == "ok" and not session.interactions:
            detail = "the agent returned a reward, but asked the model for nothing"
            outcome = RewardOutcome("error", math.nan, detail=detail)
        turns = conversation.tree.turns
        return Episode(
            rows=conversation.episode_rows(
                returns, of_turns=outcome.status == "ok" and (bool(rewards) or self._discount < 1)
            ),
            outcome=outcome,
            end=turns[-1].generated.finish_reason if turns else "abort",
            turns=conversation.notes(scores),
        )

    def _reader(self, context_tokens: int) -> ReplyReader:
        reader = self._readers.get(context_tokens)
        if reader is None:
            reader = ReplyReader(self._form, grammar=self._parser, context_tokens=context_tokens)
            self._readers[context_tokens] = reader
        return reader

    async def _reward(self, data: Mapping[str, Any]) -> tuple[RewardOutcome, Mapping[str, float]]:
        """What the agent returned, and rewards of single replies by their ids."""
        if self._function is None:
            (outcome,) = await self._processes.score([""], data)
            return outcome, outcome.rewards
        try:
            async with asyncio.timeout(self._timeout_s):
                if inspect.iscoroutinefunction(self._function):
                    value = await self._function(dict(data))
                else:
                    value = await asyncio.to_thread(self._function, dict(data))
            if value is None:
                return RewardOutcome("refused", math.nan, detail="the agent returned None"), {}
            reward, rewards = reward_of(value)
        except TimeoutError:
            detail = f"the agent took more than {self._timeout_s:g} s"
            return RewardOutcome("timeout", math.nan, detail=detail), {}
        except Exception:
            return RewardOutcome("error", math.nan, detail=traceback.format_exc()), {}
        return RewardOutcome("ok", reward, rewards), rewards


def _not_over_http(task_id: str) -> NoReturn:
    raise ApiError(403, f"sessions of a run are started by the run, and not for {task_id!r}")


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
